"""Load a checkpoint into a model, or into the whole training state.

Names, shapes and dtypes are compared before any tensor is read or changed.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.layout import Shapes, aliases_in
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.savable import compare_shapes
from trainer.checkpoint.tree import INNER, is_extra_state, put_together
from trainer.distributed.agreement import Agreement
from trainer.errors import UserError
from trainer.files.untrusted import first_five
from trainer.model.plain_names import (
    buffers_outside,
    every_parameter,
    load_model_state,
    model_state,
    named_buffers,
    named_modules,
)
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.combined import has_user_part
from trainer.optim.resumed import SCHEDULED_OPTIONS
from trainer.state.train_state import TrainState
from trainer.tensors.bits import as_bytes, same_bits
from trainer.tensors.local_shard import is_dtensor

log = logging.getLogger(__name__)

_OPTIONS_WITH_STATE = ("amsgrad", "centered")  # options of torch's optimizers that add state


def restore(
    state: TrainState,
    source: OpenCheckpoint,
    frozen: Mapping[str, str],
    agreement: Agreement,
) -> list[dict[str, Any]]:
    """Load a checkpoint into ``state``, and return the data position of each rank (a collective).

    Raises:
        UserError: on every rank, if the checkpoint is from a different model or optimizer, or cannot be read.
    """
    plain, targets = source.facts["state"], dict[str, Tensor]()

    def fit() -> tuple[list[str], list[dict[str, Any]]]:
        """Check on all ranks that the state fits the model and the optimizer, before any value is changed."""
        check_left_out(source, frozen)
        _separate_buffers(state.model, source)
        found, notes = targets_for(state, source)
        targets.update(found)
        return notes, source.data_states()

    def read() -> None:
        source.read_into(targets)
        state.load_state_dict(saved_state(plain, targets, state.trainable))

    notes, data_states = agreement.everywhere(fit)
    agreement.everywhere(read)
    if agreement.rank == 0:
        for note in notes:
            log.warning("%s %s", source.directory, note)
        log.info("resumed from %s at step %d", source.directory, state.progress.step)
    return data_states


def load_model(model: nn.Module, source: OpenCheckpoint) -> None:
    """Load the model's state dict, and the non-persistent buffers that were saved with the same shape."""
    _separate_buffers(model, source)
    own = model_state(model)
    targets = model_targets(own, source.shapes, source.left_out)
    others = {f"buffers.{name}": buffer for name, buffer in buffers_outside(model, set(own)).items()}
    targets |= _matching(others, source.shapes)
    with torch.no_grad():
        source.read_into(targets)
    load_model_state(model, put_together(source.facts["state"]["model"], targets))


def targets_for(state: TrainState, source: OpenCheckpoint) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors to read a checkpoint into, by their saved names, and notes on mismatches.

    The targets are the model's own tensors, its non-persistent buffers if they were saved with the same
    shape, and new tensors for this rank's optimizer state. State with the shape of its parameter is laid out
    and sharded like the parameter. Other state is created on the CPU, and moved by
    ``Optimizer.load_state_dict``.
    """
    own, shapes, notes = state.state_dict(), source.shapes, []
    targets = model_targets(own["model"], shapes, source.left_out)
    saved_groups = source.facts["state"]["optimizer"]["param_groups"]
    _compare_optimizers(state, own["optimizer"]["param_groups"], saved_groups)
    buffers = {f"buffers.{name}": value for name, value in own["buffers"].items()}
    matching = _matching(buffers, shapes)
    if missing := sorted(name.partition(".")[2] for name in buffers.keys() - matching.keys()):
        notes.append(
            f"lacks these buffers, or has them with other shapes, so they keep their initial values: "
            f"{first_five(missing)}"
        )
    if unused := [name for name in shapes if name.startswith("buffers.") and name not in buffers]:
        unused = [name.partition(".")[2] for name in unused]
        notes.append(f"contains buffers that the model does not have: {first_five(unused)}")
    averages = {f"ema.weights.{name}": value for name, value in own["ema"].get("weights", {}).items()}
    if _matching(averages, shapes).keys() != averages.keys():
        averages = {}
    if state.average is not None and not averages:
        notes.append(
            "lacks moving averages of these weights (ema.decay); averaging starts from the saved weights"
        )
    targets |= matching | averages
    for name, (shape, dtype) in shapes.items():
        if name in targets or name.startswith(("buffers.", "ema.")):
            continue
        parameter_name = parameter_of(name, shape, state.trainable)
        if not state.trainable.is_elsewhere(parameter_name):
            is_owned = parameter_name in state.trainable.owners
            parameter = None if is_owned else state.trainable.whole.get(parameter_name)
            # "step" is on the CPU, and so are the inner tensors of a subclass, which moves them together.
            is_inner = name.rpartition(".")[2].startswith(INNER)
            if parameter is not None and parameter.shape == shape and len(shape) > 0 and not is_inner:
                targets[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                targets[name] = torch.empty(shape, dtype=dtype)
    return targets, notes


def model_targets(own: Mapping[str, Any], shapes: Shapes, left_out: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors to read the model's part of a checkpoint into, by their saved names.

    These are the tensors in ``own``, the model's state dict, including the parameters in ``left_out``, which
    the checkpoint does not contain, and new tensors for the extra state of modules.
    """
    named = {f"model.{name}": value for name, value in own.items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in named.items() if not is_extra_state(name)}
    saved = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    extra = {name: shapes[name] for name in saved if is_extra_state(name)}
    compare_shapes(
        {name: shape for name, shape in saved.items() if name not in extra},
        {n: (t.shape, t.dtype) for n, t in tensors.items() if n.removeprefix("model.") not in left_out},
    )
    return tensors | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in extra.items()}


def saved_state(
    plain: Mapping[str, Any], targets: Mapping[str, Tensor], trainable: TrainableParameters
) -> dict[str, Any]:
    """Combine ``plain`` and the filled ``targets`` into the state for ``TrainState.load_state_dict``."""
    states = plain["optimizer"]["state"]
    own_states = {name: states[name] for name in states if not trainable.is_elsewhere(name)}
    buffers = {name: value for name, value in plain["buffers"].items() if f"buffers.{name}" in targets}
    average = plain["ema"] if any(name.startswith("ema.") for name in targets) else {}
    changes = {"buffers": buffers, "ema": average, "optimizer": plain["optimizer"] | {"state": own_states}}
    saved: dict[str, Any] = put_together({**plain, **changes}, targets)
    return saved


def parameter_of(name: str, shape: torch.Size, trainable: TrainableParameters) -> str:
    """Return the name of the parameter to which the optimizer's tensor ``name`` belongs; "" if none.

    The tensor may be nested in the parameter's state.

    Raises:
        UserError: if the parameter is sharded and updated in shards, and the tensor has a different shape.
    """
    prefix = name.removeprefix("optimizer.state.")
    while prefix and prefix not in trainable.whole:
        prefix = prefix.rpartition(".")[0]
    parameter = trainable.whole.get(prefix)
    is_sharded = is_dtensor(parameter) and prefix not in trainable.owners
    if parameter is not None and is_sharded and len(shape) > 0 and shape != parameter.shape:
        raise UserError(
            f"{name} has shape {list(shape)}, but its parameter has shape {list(parameter.shape)}, so it "
            "cannot be sharded like the parameter; train without FSDP, or use another optimizer"
        )
    return prefix


def frozen_digests(model: nn.Module, initial: Mapping[int, Tensor]) -> dict[str, str]:
    """Return the sha256 of each frozen parameter that was read from `model.init_from`, by all its names.

    Call it after parameters have been frozen and before the model is sharded.

    Args:
        initial: the tensor that was read for each parameter, by the id of the parameter.
    """
    return {
        name: hashlib.sha256(as_bytes(initial[id(parameter)].to(parameter.dtype))).hexdigest()
        for name, parameter in every_parameter(model)
        if not parameter.requires_grad and id(parameter) in initial
    }


def check_left_out(source: OpenCheckpoint, frozen: Mapping[str, str]) -> None:
    """Raise UserError unless parameters that `source` lacks have the same initial values as in its run."""
    different = [name for name, digest in source.left_out.items() if frozen.get(name) != digest]
    if different:
        raise UserError(
            f"{source.directory} does not contain {first_five(different)}, because its run had "
            f"checkpoint.frozen=false, and {source.initial_weights} has different values for them now or is "
            "not used by this run; set model.init_from to the unchanged weights, and model.freeze and "
            "checkpoint.frozen as in that run"
        )


def _compare_optimizers(state: TrainState, groups: Sequence[Any], saved_groups: Sequence[Any]) -> None:
    """Raise UserError unless the saved optimizer has the parameters and options of this run's optimizer.

    Parameter groups may differ, except with a user's own optimizer, which may keep state in its groups.
    """
    own, saved = (
        {name: group for group in all_ for name in group["params"]} for all_ in (groups, saved_groups)
    )
    members, saved_members = ([group["params"] for group in all_] for all_ in (groups, saved_groups))
    if own.keys() != saved.keys() or (has_user_part(state.optimizer) and members != saved_members):
        different = first_five(sorted(own.keys() ^ saved.keys())) or "they are grouped differently"
        raise UserError(
            f"the checkpoint's optimizer has {len(saved)} parameters in {len(saved_groups)} groups, but this "
            f"run's optimizer has {len(own)} in {len(groups)}: {different}; set model, model.freeze and, for "
            "an optimizer of your own, optim.groups, optim.weight_decay and optim.no_decay as in the "
            "checkpoint"
        )
    for group in groups:
        saved_group = saved[group["params"][0]]
        missing = group.keys() - saved_group.keys() - SCHEDULED_OPTIONS - {"name"}
        missing |= {name for name in _OPTIONS_WITH_STATE if group.get(name) and not saved_group.get(name)}
        if missing:
            raise UserError(
                "the checkpoint is from a different optimizer, which has no "
                f"{first_five(sorted(missing))}; set optim as in the checkpoint"
            )


def _matching(tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if shapes.get(name) == (value.shape, value.dtype)}


def _separate_buffers(model: nn.Module, source: OpenCheckpoint) -> None:
    """Give a buffer its own memory if it shares memory with a tensor that was saved with different values."""
    modules, buffers = dict(named_modules(model)), dict(named_buffers(model))
    prefixes = ("model.", "buffers.")
    saved = {name.partition(".")[2]: name for name in source.shapes if name.startswith(prefixes)}
    # Parameters come first, and so keep the memory.
    plain = {name: p.detach() for name, p in every_parameter(model) if not is_dtensor(p)}
    for name, other in aliases_in({**plain, **buffers}).items():
        if name in buffers and {name, other} <= saved.keys():
            values = source.read_named([saved[name], saved[other]])
            if not same_bits(values[saved[name]], values[saved[other]]):
                prefix, _, attribute = name.rpartition(".")
                setattr(modules[prefix], attribute, buffers[name].clone())
