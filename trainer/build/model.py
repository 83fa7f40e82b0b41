"""Builds the model: its initial weights, its adapters, its frozen parameters, and the strategy's wrapper."""

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
    if isinstance(config.strategy, UnitsConfig) and config.strategy.activation_checkpointing:
        compiled = config.train.compile
        strategy.notes.append(checkpoint_activations(model.module, config.strategy, compiled))
    wrapped = strategy.wrap(model.module, model.fill)
    keep_frozen_statistics(strategy.unwrap(wrapped))
    strategy.notes += model.notes
    return wrapped


def build_model(node: dict[str, Any], train_set: Any) -> nn.Module:
    """Build the model; `auto` settings are taken from the training data."""
    for name, things in (("num_classes", "classes"), ("vocab_size", "tokens")):
        given, there = node.get(name), getattr(train_set, name, None)
        if isinstance(given, int) and isinstance(there, int) and given < there:
            raise UserError(
                f"model.{name} is {given}, but the data has {there} {things}: its largest label is "
                f"{there - 1}; set model.{name}={there}, or auto"
            )
    border = getattr(train_set, "border", None)
    if border is not None and node.get("border") != border:
        raise UserError(
            f"data.dataset.border is {border}, but model.border is {node.get('border')}: documents would see "
            f"each other; set model.border={border}, which model=gpt takes, or data.dataset.border=null"
        )
    model = instantiate("model", model_settings(node), facts=train_set)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: {node['_target_']} creates a {type(model).__name__}, which is not a torch.nn.Module"
        )
    parameters = dict(model.named_parameters())
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise UserError(
            f"model: {node['_target_']} leaves the shape of {', '.join(lazy)} to its first batch, but ranks "
            "and optimizer need it before: set the sizes, as in torch.nn.Linear for LazyLinear"
        )
    for name, tensor in {**parameters, **dict(named_buffers(model)), **model.state_dict()}.items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        if is_plain and (problem := unsavable(tensor)) is not None:  # wrapping it would fail less clearly
            raise UserError(f"model: {node['_target_']} has {name}, which {problem}")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model: {node['_target_']} has nothing to train: none of its {len(parameters)} parameters "
            "requires a gradient"
        )
    return model


def initial_model(
    config: Config,
    train_set: Any,
    sharded_over: Ranks | None = None,
    read_by: tuple[Agreement, int] | None = None,
    on_meta: bool = False,
) -> InitialModel:
    """Return the model as a run begins: built, with its initial weights and adapters, and frozen in part.

    A collective of `sharded_over` and `read_by`.

    Args:
        train_set: what gives settings of `auto` their values; None if none has to.
        sharded_over: ranks that need no whole model, since the strategy fills one unit after another.
        read_by: agreement and local rank of those who read `model.init_from`; None: it is not needed.
        on_meta: build without memory, to measure the model, where that is possible.

    Raises:
        UserError: the settings of the model are wrong; or adapters would freeze what has random values.
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
    """Raise UserError if adapters froze some of `trained` that `init_from` did not give."""
    random = {id(parameter) for parameter in trained if not parameter.requires_grad} - initial.keys()
    names = [name for name, parameter in module.named_parameters() if id(parameter) in random]
    # peft trains a copy of a module in modules_to_save, and keeps the original.
    left = [name for name in names if "original_module" not in name.split(".")]
    if left and not initial:
        log.warning(
            "model.adapters freezes %s as the model's constructor made them: model.init_from is null",
            first_few(left, 1),
        )
    elif left:
        raise UserError(
            f"model.adapters would leave random values in {first_few(left)}: frozen, and not in "
            "model.init_from; name their modules in model.adapters.modules_to_save, which trains them"
        )


def _start_from(
    node: dict[str, Any], model: InitialModel, agreement: Agreement, local_rank: int
) -> dict[int, Tensor]:
    """Load the initial weights of the model: those of `init_from`, or those that the model specifies.

    A model may have an attribute `pretrained`, a function that returns the path of a file of weights.

    Returns:
        By the id of a tensor of the model, what was found for it; rank 0 has all, others perhaps none.
    """
    source, ignore, key = node.get("init_from"), node.get("init_ignore") or (), node.get("init_key")
    frozen = patterns("model.freeze", node.get("freeze"))
    named = getattr(model.module, "pretrained", None)
    if source is not None and named is not None:
        raise UserError(f"model.init_from={source} and model.weights={node.get('weights')}: set one of them")
    if named is not None:  # the first process of each host may have to download the file for the others
        agreement.everywhere(lambda: _file(named) if local_rank == 0 else None)
        source = agreement.everywhere(lambda: _file(named))
    if source is None:
        return {}
    found: dict[str, Tensor] = {}

    def read() -> dict[str, Tensor]:
        found.update(weights_for(model.module, source, ignore, key, frozen))
        return found

    agreement.everywhere(lambda: model.load(read))  # if a host lacks the file, all ranks end with one message
    held = model.module.state_dict(keep_vars=True)
    return {id(held[name]): tensor for name, tensor in found.items()}


def _file(pretrained: Callable[[], Path]) -> Path:
    try:
        return pretrained()
    except (ValueError, OSError) as error:
        raise UserError(f"model.weights: {error}") from error
