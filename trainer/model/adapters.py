"""Adapters from the library peft (`model.adapters`): a few trainable parameters in a frozen model."""

import json
from typing import Any

from torch import Tensor, nn

from trainer.config.instantiate import instantiate
from trainer.errors import UserError, on_one_line, optional
from trainer.model.plain_names import model_state


def add_adapters(model: nn.Module, node: dict[str, Any]) -> None:
    """Add adapters to `model` in place, and freeze its other parameters.

    `node` is the setting model.adapters, a `_target_` node of a `peft.PeftConfig`. The adapters are on the
    meta device if the model is.
    """
    optional("peft", "model.adapters")
    from peft import PeftConfig
    from peft.functional import cast_adapter_dtype, inject_adapter_in_model

    config = instantiate("model.adapters", node)
    if not isinstance(config, PeftConfig):
        raise UserError(
            f"model.adapters: expected a configuration of peft, such as peft.LoraConfig, but "
            f"{node['_target_']} returned a {type(config).__name__}"
        )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
        cast_adapter_dtype(model, "default")  # 16-bit parameters would lose small updates
    except (ValueError, TypeError, LookupError, NotImplementedError) as error:
        raise UserError(f"model.adapters: {on_one_line(error)}") from error


def adapters_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of the adapters, and the names of their tensors, for `convert --to peft`.

    Return None without peft adapters, or if their files would contain tensors that the model lacks.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return None
    from peft import PeftModel, get_peft_model_state_dict

    tensors = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    names = {id(value): name for name, value in tensors.items()}
    adapter, config = next(iter(configs.items()))
    saved = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    if any(id(value) not in names for value in saved.values()):
        return None
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."  # PeftModel adds this prefix itself
    settings = json.loads(json.dumps(config.to_dict() | {"inference_mode": True}, default=sorted))
    return {"config": settings, "names": {prefix + name: names[id(value)] for name, value in saved.items()}}
