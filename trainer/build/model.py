"""Build the model, with initial weights, adapters, frozen parameters, and the strategy's wrapper."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.checkpoint.savable import unsavable
from trainer.checkpoint.weights import weights_for
from trainer.config import Config, UnitsConfig, model_settings, patterns
from trainer.config.instantiate import instantiate
from trainer.distributed.agreement import Agreement
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_few
from trainer.model.adapters import add_adapters
from trainer.model.frozen_statistics import keep_frozen_statistics
from trainer.model.plain_names import named_buffers
from trainer.optim.param_groups import freeze
from trainer.strategies.base import Strategy
from trainer.strategies.meta_init import InitialModel, constructed, constructed_on_meta
from trainer.strategies.units import checkpoint_activations

log = logging.getLogger(__name__)


def wrap_model(config: Config, model: InitialModel, strategy: Strategy) -> nn.Module:
    """Wrap the model with `strategy`, after activation checkpointing if the settings enable it."""
    if isinstance(config.strategy, UnitsConfig) and config.strategy.activation_checkpointing:
        compiled = config.train.compile
        strategy.notes.append(checkpoint_activations(model.module, config.strategy, compiled))
    wrapped = strategy.wrap(model.module, model.fill)
    keep_frozen_statistics(strategy.unwrap(wrapped))
    strategy.notes += model.notes
    return wrapped


def build_model(node: dict[str, Any], train_set: Any) -> nn.Module:
    """Build the model, with `auto` settings taken from the training data."""
    for name, noun in (("num_classes", "classes"), ("vocab_size", "tokens")):
        given, required = node.get(name), getattr(train_set, name, None)
        if isinstance(given, int) and isinstance(required, int) and given < required:
            raise UserError(
                f"model.{name}={given} is too small: the data has {required} {noun}, and its largest label "
                f"is {required - 1}; set model.{name}={required}, or auto"
            )
    border = getattr(train_set, "border", None)
    if border is not None and node.get("border") != border:
        raise UserError(
            f"data.dataset.border={border}, but model.border={node.get('border')}, so the model would attend "
            f"across documents; set model.border={border} (model=gpt accepts it), or data.dataset.border=null"
        )
    model = instantiate("model", model_settings(node), facts=train_set)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: expected a torch.nn.Module, but {node['_target_']} returned a {type(model).__name__}"
        )
    parameters = dict(model.named_parameters())
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise UserError(
            f"model: {node['_target_']} has uninitialized parameters: {', '.join(lazy)}. Lazy modules are "
            "not supported, because their shapes must be known before the first batch; use torch.nn.Linear "
            "in place of LazyLinear, for example"
        )
    for name, tensor in {**parameters, **dict(named_buffers(model)), **model.state_dict()}.items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        if is_plain and (problem := unsavable(tensor)) is not None:  # a wrapper's error is less clear
            raise UserError(f"model: {node['_target_']} has {name}, which {problem}")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model: {node['_target_']} has nothing to train: none of its {len(parameters)} parameters "
            "requires a gradient; keep requires_grad=True for at least one"
        )
    return model


def initial_model(
    config: Config,
    train_set: Any,
    sharded_over: Ranks | None = None,
    read_by: tuple[Agreement, int] | None = None,
    on_meta: bool = False,
) -> InitialModel:
    """Return the model as at the start of a run, with initial weights, adapters, and frozen parameters.

    A collective if `sharded_over` or `read_by` is given.

    Args:
        train_set: the data from which `auto` settings take their values; None if no setting is `auto`.
        sharded_over: if given, only rank 0 builds the whole model, because the strategy fills one unit at a
            time.
        read_by: the agreement and the local rank with which to read `model.init_from`; None: do not read it.
        on_meta: build on the meta device where possible, to measure the model without allocating memory.
    """
    assert config.seed is not None
    build = partial(build_model, config.model, train_set)
    model = (
        constructed_on_meta(build, config.seed) if on_meta else constructed(build, config.seed, sharded_over)
    )
    if read_by:
        model.loaded = _start_from(config.model, model, *read_by)
    if (adapters := config.model.get("adapters")) is not None:
        trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        model.extend(lambda module: add_adapters(module, adapters))
        if read_by:
            read_by[0].on_main(lambda: _refuse_random(model.module, trained, model.loaded))
    freeze(model.module, config.model)
    return model


def _refuse_random(module: nn.Module, trained: list[nn.Parameter], initial: Mapping[int, Tensor]) -> None:
    """Raise UserError if adapters froze parameters of `trained` that `init_from` does not contain."""
    random = {id(parameter) for parameter in trained if not parameter.requires_grad} - initial.keys()
    names = [name for name, parameter in module.named_parameters() if id(parameter) in random]
    # For modules in modules_to_save, peft trains a copy and keeps the original.
    frozen = [name for name in names if "original_module" not in name.split(".")]
    if frozen and not initial:
        log.warning(
            "model.adapters freezes %s, with values from the constructor, because model.init_from=null",
            first_few(frozen, 1),
        )
    elif frozen:
        raise UserError(
            f"model.adapters would freeze {first_few(frozen)} at random values, because model.init_from does "
            "not contain them; list their modules in model.adapters.modules_to_save, which trains them"
        )


def _start_from(
    node: dict[str, Any], model: InitialModel, agreement: Agreement, local_rank: int
) -> dict[int, Tensor]:
    """Load the model's initial weights from `init_from`, or from the file that the model specifies.

    A model may have an attribute `pretrained`, a function that returns the path of a file of weights.

    Returns:
        The loaded tensors by the id of the model's tensor; complete on rank 0, possibly empty on other ranks.
    """
    source, ignore, key = node.get("init_from"), node.get("init_ignore") or (), node.get("init_key")
    frozen = patterns("model.freeze", node.get("freeze"))
    named = getattr(model.module, "pretrained", None)
    if source is not None and named is not None:
        raise UserError(
            f"model.init_from={source} and model.weights={node.get('weights')} are both set; set only one of "
            "them"
        )
    if named is not None:  # the first process of each host may download the file
        agreement.everywhere(lambda: _file(named) if local_rank == 0 else None)
        source = agreement.everywhere(lambda: _file(named))
    if source is None:
        return {}
    found: dict[str, Tensor] = {}

    def read() -> dict[str, Tensor]:
        found.update(weights_for(model.module, source, ignore, key, frozen))
        return found

    agreement.everywhere(lambda: model.load(read))  # all ranks raise an error if the file is missing
    tensors = model.module.state_dict(keep_vars=True)
    return {id(tensors[name]): tensor for name, tensor in found.items()}


def _file(pretrained: Callable[[], Path]) -> Path:
    try:
        return pretrained()
    except (ValueError, OSError) as error:
        raise UserError(f"model.weights: {error}") from error
