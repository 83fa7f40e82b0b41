"""Adapters of the library peft (`model.adapters`): few trained parameters in a frozen model."""

import json
from typing import Any

from torch import Tensor, nn

from trainer.config.instantiate import instantiate
from trainer.errors import UserError, on_one_line, optional
from trainer.model.plain_names import model_state


def add_adapters(model: nn.Module, node: dict[str, Any]) -> None:
    """Put adapters into `model`, in place, and freeze its own parameters.

    Where the model is on the meta device, they are too.

    Args:
        node: model.adapters, the `_target_` node of a `peft.PeftConfig`.

    Raises:
        UserError: peft is not installed, or cannot put these into this model.
    """
    optional("peft", "model.adapters")
    from peft import PeftConfig
    from peft.functional import cast_adapter_dtype, inject_adapter_in_model

    config = instantiate("model.adapters", node)
    if not isinstance(config, PeftConfig):
        raise UserError(
            f"model.adapters: {node['_target_']} creates a {type(config).__name__}, but must create a "
            "configuration of peft, such as peft.LoraConfig"
        )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
        cast_adapter_dtype(model, "default")  # in 16 bits small updates would be lost
    except (ValueError, TypeError, LookupError, NotImplementedError) as error:
        raise UserError(f"model.adapters: {on_one_line(error)}") from error


def adapters_of(model: nn.Module) -> dict[str, Any] | None:
    """What `convert --to peft` needs: the adapters' configuration, and the names of their tensors.

    None without adapters of peft, and for kinds whose files hold other tensors than the model.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return None
    from peft import PeftModel, get_peft_model_state_dict

    held = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    names = {id(value): name for name, value in held.items()}
    adapter, config = next(iter(configs.items()))
    saved = get_peft_model_state_dict(model, held, adapter, save_embedding_layers=False)
    if any(id(value) not in names for value in saved.values()):
        return None
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."  # which peft's own class adds
    settings = json.loads(json.dumps(config.to_dict() | {"inference_mode": True}, default=sorted))
    return {"config": settings, "names": {prefix + name: names[id(value)] for name, value in saved.items()}}
