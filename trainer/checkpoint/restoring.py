"""A checkpoint read into a model, or all that a run trains: that it fits is known before anything changes.

It is compared by names, shapes and dtypes before any of its tensors is read.
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
from trainer.checkpoint.tree import WITHIN, is_extra_state, put_together
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
from trainer.optim.resumed import OF_SCHEDULES
from trainer.state.train_state import TrainState
from trainer.tensors.bits import as_bytes, same_bits
from trainer.tensors.local_shard import is_dtensor

log = logging.getLogger(__name__)

_WITH_STATE = ("amsgrad", "centered")  # options of torch's optimizers that need more state


def restore(
    state: TrainState,
    source: OpenCheckpoint,
    frozen: Mapping[str, str],
    agreement: Agreement,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Load a checkpoint into all that a run trains; return where the data of each rank stood (a collective).

    Args:
        frozen: `frozen_digests` of the model.
        device: where the model computes.

    Raises:
        UserError: on every rank alike: it is of another model or optimizer, or cannot be read.
    """
    plain, targets = source.facts["state"], dict[str, Tensor]()

    def fit() -> tuple[list[str], list[dict[str, Any]]]:
        """No more than buffers is changed before all ranks have found that all of the state fits."""
        check_left_out(source, frozen)
        left = make_buffers(state.model, source, device)
        found, lacks = targets_for(state, source)
        targets.update(found)
        notes = [f"lacks {words}" for words in lacks]
        if left:
            notes.append(f"also holds buffers that the model has no place for: {first_five(left)}")
        return notes, source.data_states()

    def read() -> None:
        source.read_into(targets)
        state.load_state_dict(saved_state(plain, targets, state.trainable))

    notes, data_states = agreement.everywhere(fit)
    agreement.everywhere(read)
    if agreement.rank == 0:
        for words in notes:
            log.warning("%s %s", source.directory, words)
        log.info("resumed from %s at step %d", source.directory, state.progress.step)
    return data_states


def load_model(model: nn.Module, source: OpenCheckpoint, device: torch.device) -> None:
    """Load the model's state, and those of its other buffers that were saved in the same size."""
    make_buffers(model, source, device)
    held = model_state(model)
    targets = model_targets(held, source.shapes, source.left_out)
    others = {f"buffers.{name}": buffer for name, buffer in buffers_outside(model, set(held)).items()}
    targets |= _those_of(others, source.shapes)
    with torch.no_grad():
        source.read_into(targets)
    load_model_state(model, put_together(source.facts["state"]["model"], targets))


def targets_for(state: TrainState, source: OpenCheckpoint) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors to read a checkpoint into, by their saved names; and what it lacks, in words for the log.

    These are the model's own tensors, its other buffers if they were saved in the same size, and new tensors
    for the optimizer's state: laid out and sharded like the parameter if they have its shape, otherwise on
    the CPU, from where ``Optimizer.load_state_dict`` moves them. None for state that another rank has.

    Raises:
        UserError: the checkpoint is of another model or optimizer; lists the first five differences of each
            kind.
    """
    ours, shapes, lacks = state.state_dict(), source.shapes, []
    targets = model_targets(ours["model"], shapes, source.left_out)
    theirs = source.facts["state"]["optimizer"]["param_groups"]
    _compare_optimizers(state, ours["optimizer"]["param_groups"], theirs)
    buffers = {f"buffers.{name}": value for name, value in ours["buffers"].items()}
    fitting = _those_of(buffers, shapes)
    if others := sorted(name.partition(".")[2] for name in buffers.keys() - fitting.keys()):
        lacks.append(f"these buffers, or has others; they keep their initial values: {first_five(others)}")
    averages = {f"ema.weights.{name}": value for name, value in ours["ema"].get("weights", {}).items()}
    if _those_of(averages, shapes).keys() != averages.keys():
        averages = {}
    if state.average is not None and not averages:
        lacks.append("averages of these weights (ema.decay); they begin with its weights")
    targets |= fitting | averages
    for name, (shape, dtype) in shapes.items():
        if name in targets or name.startswith(("buffers.", "ema.")):
            continue
        of = parameter_of(name, shape, state.trainable)
        if not state.trainable.is_elsewhere(of):
            parameter = state.trainable.whole.get(of) if of not in state.trainable.owners else None
            # "step" is on the CPU, and so are all tensors within one, which its class moves together.
            within = name.rpartition(".")[2].startswith(WITHIN)
            if parameter is not None and parameter.shape == shape and len(shape) > 0 and not within:
                targets[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                targets[name] = torch.empty(shape, dtype=dtype)
    return targets, lacks


def model_targets(ours: Mapping[str, Any], shapes: Shapes, left_out: Collection[str]) -> dict[str, Tensor]:
    """The tensors to read the model's part of a checkpoint into, by their saved names.

    These are the tensors in ``ours``, its own state dict, and new ones for the extra state of its modules.
    Those of ``left_out`` are among them, though they are not in the checkpoint.

    Raises:
        UserError: the checkpoint is of another model.
    """
    named = {f"model.{name}": value for name, value in ours.items() if isinstance(value, Tensor)}
    own = {name: value for name, value in named.items() if not is_extra_state(name)}
    saved = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    kept = {name: shapes[name] for name in saved if is_extra_state(name)}
    compare_shapes(
        {name: shape for name, shape in saved.items() if name not in kept},
        {n: (own[n].shape, own[n].dtype) for n in own if n.removeprefix("model.") not in left_out},
    )
    return own | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kept.items()}


def saved_state(
    plain: Mapping[str, Any], targets: Mapping[str, Tensor], trainable: TrainableParameters
) -> dict[str, Any]:
    """The saved state for ``TrainState.load_state_dict``, made of ``plain`` and ``targets``, once read."""
    states = plain["optimizer"]["state"]
    here = {name: states[name] for name in states if not trainable.is_elsewhere(name)}
    buffers = plain["buffers"]
    read = {name: value for name, value in buffers.items() if f"buffers.{name}" in targets}
    average = plain["ema"] if any(name.startswith("ema.") for name in targets) else {}
    changes = {"buffers": read, "ema": average, "optimizer": plain["optimizer"] | {"state": here}}
    saved: dict[str, Any] = put_together({**plain, **changes}, targets)
    return saved


def parameter_of(name: str, shape: torch.Size, trainable: TrainableParameters) -> str:
    """The parameter to whose state the optimizer's tensor ``name`` belongs, maybe in lists; "" without one.

    Raises:
        UserError: it is sharded and not updated whole, and the tensor has another shape.
    """
    prefix = name.removeprefix("optimizer.state.")
    while prefix and prefix not in trainable.whole:
        prefix = prefix.rpartition(".")[0]
    parameter = trainable.whole.get(prefix)
    in_rows = is_dtensor(parameter) and prefix not in trainable.owners
    if parameter is not None and in_rows and len(shape) > 0 and shape != parameter.shape:
        words = "has another shape than its parameter and cannot be sharded; resume, or begin, without FSDP"
        raise UserError(f"{name} {words}")
    return prefix


def frozen_digests(model: nn.Module, initial: Mapping[int, Tensor]) -> dict[str, str]:
    """The sha256 of each frozen parameter of `model` that `model.init_from` gave, under each of its names.

    Called when parameters have their final names and are frozen; before the model is sharded.

    Args:
        initial: by the id of a parameter, the tensor that `trainer.build.model.begin` found for it.
    """
    return {
        name: hashlib.sha256(as_bytes(initial[id(parameter)].to(parameter.dtype))).hexdigest()
        for name, parameter in every_parameter(model)
        if not parameter.requires_grad and id(parameter) in initial
    }


def check_left_out(source: OpenCheckpoint, frozen: Mapping[str, str]) -> None:
    """Raise UserError unless a model with these `frozen_digests` began with what `source` leaves out."""
    others = [name for name, digest in source.left_out.items() if frozen.get(name) != digest]
    if others:
        raise UserError(
            f"{source.directory} leaves out {first_five(others)}, as checkpoint.frozen=false has it: "
            f"{source.initial_weights} had other values for them, or is not read now; set model.init_from to "
            "those weights as they were, and model.freeze and checkpoint.frozen as in that run"
        )


def _compare_optimizers(state: TrainState, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raise UserError unless both groups have the same parameters, and `theirs` all options of `mine`.

    New settings may group them otherwise, except for a user's own optimizer: it may keep state in groups.
    """
    here, there = ({name: group for group in groups for name in group["params"]} for groups in (mine, theirs))
    members = [[group["params"] for group in groups] for groups in (mine, theirs)]
    if here.keys() != there.keys() or (has_user_part(state.optimizer) and members[0] != members[1]):
        differ = first_five(sorted(here.keys() ^ there.keys())) or "they are grouped otherwise"
        raise UserError(
            f"the checkpoint's optimizer has {len(there)} parameters in {len(theirs)} groups, this run's "
            f"{len(here)} in {len(mine)}: {differ}; model, model.freeze and, for an optimizer of your own, "
            "optim.groups, optim.weight_decay and optim.no_decay must be those of the checkpoint"
        )
    for group in mine:
        then = there[group["params"][0]]
        missing = group.keys() - then.keys() - OF_SCHEDULES - {"name"}
        missing |= {option for option in _WITH_STATE if group.get(option) and not then.get(option)}
        if missing:
            words = first_five(sorted(missing))
            raise UserError(f"the checkpoint is of another optimizer, without {words}; set optim as it was")


def _those_of(tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """Those of ``tensors`` that are in ``shapes`` in the same size and dtype."""
    return {name: one for name, one in tensors.items() if shapes.get(name) == (one.shape, one.dtype)}


@torch.no_grad()
def make_buffers(model: nn.Module, source: OpenCheckpoint, device: torch.device) -> list[str]:
    """Give `model` the buffers of `source`, before its values are read into them.

    Those that a forward pass made, with persistent=False, are registered. Those that begin as one tensor with
    another, and were saved with other values than it, get memory of their own.

    Args:
        device: where the model computes, unless a module of it is elsewhere.

    Returns:
        The names of saved buffers that this model has no place for.
    """
    modules, left = dict(named_modules(model)), []
    saved = {
        name.partition(".")[2]: name for name in source.shapes if name.startswith(("model.", "buffers."))
    }
    buffers = dict(named_buffers(model))
    for name in sorted(saved.keys() - buffers.keys()):
        if not saved[name].startswith("buffers."):
            continue
        prefix, _, leaf = name.rpartition(".")
        value = source.read_named([saved[name]])[saved[name]]
        try:
            module = modules[prefix]
            module.register_buffer(leaf, value.to(_device_of(module, device), copy=True), persistent=False)
        except KeyError:  # of `modules`, or since the module has something else of this name
            left.append(name)
    # Parameters come first, and so keep the memory.
    plain = {name: p.detach() for name, p in every_parameter(model) if not is_dtensor(p)}
    for name, other in aliases_in({**plain, **buffers}).items():
        if name in buffers and {name, other} <= saved.keys():
            values = source.read_named([saved[name], saved[other]])
            if not same_bits(values[saved[name]], values[saved[other]]):
                prefix, _, leaf = name.rpartition(".")
                setattr(modules[prefix], leaf, buffers[name].clone())
    return left


def _device_of(module: nn.Module, device: torch.device) -> torch.device:
    """That of the module's tensors, if the model is split over several of the kind of `device`."""
    held = (tensor.device for tensor in (*module.buffers(), *module.parameters()))
    return next((each for each in held if each.type == device.type), device)
