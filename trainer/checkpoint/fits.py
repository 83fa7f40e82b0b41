"""Whether what a run saves can be resumed, and a checkpoint fits a run: known before anything changes.

A run's state is looked at as it is built, and compared at each save. A checkpoint is compared by names,
shapes and dtypes before any of its tensors is read.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.layout import DTYPES, Shapes, aliases_in
from trainer.checkpoint.open_checkpoint import HELD_BY, OpenCheckpoint
from trainer.checkpoint.tree import is_extra_state, put_together, take_apart
from trainer.distributed.gather_shards import as_bytes
from trainer.errors import NonFiniteError, UserError, first_few
from trainer.files.untrusted import first_five, printable
from trainer.optim.adapters import adapters_of
from trainer.optim.continued import OF_SCHEDULES
from trainer.optim.optimizers import has_user_part
from trainer.optim.plain_names import (
    every_parameter,
    load_model_state,
    model_state,
    named_buffers,
    named_modules,
)
from trainer.optim.train_state import TrainState
from trainer.tensors.bits import bit_sums, changed_bits, same_bits
from trainer.tensors.local_shard import is_dtensor, to_local

_WITH_STATE = ("amsgrad", "centered")  # options of torch's optimizers that need more state

# ---- what a run saves


class Fits:
    """What each save of a run must contain, so that a resume can load it: its state as built.

    Args:
        left_out: the names of frozen parameters that no save contains; saved tensors never change them.

    Attributes:
        not_finite: the names of tensors that hold NaN or Inf from the start, as masks do; of this rank's
            shards, until `Checkpointer.bind` adds those of the others.
        model_config: the config.json of a Hugging Face model; None for other models.
        adapters: `adapters_of` the model.

    Raises:
        UserError: the model's state has a tensor that no checkpoint can hold or no resume can load; by name.
    """

    def __init__(self, state: TrainState, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        tree, left_out_now = self._parted(state)
        self._left_out_bits = bit_sums(left_out_now.items())
        tensors, _ = take_apart(tree)
        for name, tensor in tensors.items():
            if (problem := unsavable(to_local(tensor))) is not None:
                raise UserError(f"a checkpoint cannot hold {name}, which {problem}")
        _check_model(state.model)
        named = every_parameter(state.model)
        # Without DTensors: FSDP itself replaces them by gathered ones.
        self._parameters = {name: p for name, p in named if not is_dtensor(p)}
        self._shapes = _of_model(tensors)
        self.not_finite = set(not_finite(tensors))
        self.model_config = _config_of(state.model)
        self.adapters = adapters_of(state.model)

    def to_save(
        self, state: TrainState, kept: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The live tensors of ``state``, by their names in a checkpoint, and the rest of it for JSON.

        Args:
            kept: by names in the model's state, in place of its own values there.

        Raises:
            UserError: a parameter was replaced, so that no optimizer would train it; or a tensor of the model
                was made, resized or lost since the start.
        """
        now = dict(every_parameter(state.model))
        replaced = [name for name, parameter in self._parameters.items() if now.get(name) is not parameter]
        if replaced:
            raise UserError(
                f"{first_five(replaced)} of the model is another object than before the first step: the "
                "optimizer still updates the old one. Replace no parameter in a forward pass; make it in "
                "__init__, and change its values under torch.no_grad()"
            )
        tree, left_out_now = self._parted(state)
        if changed := changed_bits(self._left_out_bits, left_out_now.items()):
            raise UserError(
                f"{first_five(changed)} is frozen, but has other values than it began with, from "
                "model.init_from; checkpoint.frozen=true saves them"
            )
        if kept is not None:
            for part in ("model", "buffers"):
                tree[part] = {name: kept.get(name, value) for name, value in tree[part].items()}
        tensors, plain = take_apart(tree)
        for name, tensor in tensors.items():
            if hasattr(local := to_local(tensor), "__tensor_flatten__"):  # as 8-bit optimizers keep them
                raise UserError(
                    f"a checkpoint cannot hold {name}, a {type(local).__name__}, which is several tensors in "
                    "one; use an optimizer with plain tensors, such as optim=adamw"
                )
        _compare_shapes(
            _of_model(tensors),
            self._shapes,
            "the model's state is no longer what it was before the first step, and no resume could load it",
            ("now", "then"),
            "; make buffers in __init__, in their final size, or with persistent=False if none need be saved",
        )
        return tensors, plain

    def _parted(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state to be saved, and what this process holds of the parameters that are left out."""
        tree = state.state_dict()
        return tree, {name: to_local(tree["model"].pop(name)) for name in self._left_out}

    def new_in(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """`not_finite` of those of ``tensors`` that were finite at the start."""
        return not_finite({name: tensors[name] for name in tensors if name not in self.not_finite})


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of ``tensors`` of which this process holds a NaN or Inf.

    If all are finite, this costs one read of them, and one wait for each device.
    """
    here = {name: _real(to_local(tensor)) for name, tensor in tensors.items()}
    here = {name: part for name, part in here.items() if part.numel() and part.is_floating_point()}
    # Both extremes are NaN if any number is: five times as fast as isfinite, which allocates as much memory.
    ends: dict[torch.device, list[Tensor]] = {}
    for part in here.values():
        ends.setdefault(part.device, []).extend(part.aminmax())
    if all(torch.stack(of_device).isfinite().all() for of_device in ends.values()):
        return []
    return [name for name, part in here.items() if not part.isfinite().all()]


def refuse_not_finite(found: Sequence[Sequence[str]], step: int, hosts: Sequence[str]) -> None:
    """Raise NonFiniteError if a rank has ``found`` something; ``hosts`` describes the ranks."""
    for rank, names in enumerate(found):
        if names:
            shown = first_few((name.removeprefix("model.") for name in names), 1)
            raise NonFiniteError(
                f"{shown} holds NaN or Inf after step {step} on {hosts[rank]}; nothing of that step is "
                "saved. Lower optim.lr, or set train.clip_grad_norm; resume=auto continues from the "
                "checkpoint before",
                ranks=(rank,),
            )


def unsavable(tensor: Tensor) -> str | None:
    """Why a checkpoint cannot hold ``tensor``, or a resume cannot fill it, as the end of a sentence."""
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); save it dense, with to_dense()"
    if tensor.is_meta or tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter):
        return f"is on the meta device, nested or a {type(tensor).__name__}, not a plain tensor with numbers"
    if tensor.dtype not in DTYPES.values():
        return f"is of {tensor.dtype}, which no checkpoint holds; keep its bytes, with view(torch.uint8)"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: torch fills no tensor whose numbers share memory; add .clone()"
    return None


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config.json of a model of transformers; None for other models.

    One that is part of another model, or has adapters within, has other names than `from_pretrained` looks
    for: then only which class holds it.
    """
    parts = (part for part in model.modules() if hasattr(type(part), "base_model_prefix"))
    config: Any = getattr(part := next(parts, None), "config", None)
    if not isinstance(getattr(config, "model_type", None), str) or not hasattr(config, "to_json_string"):
        return None
    if part is not model or any("base_layer" in name.split(".") for name, _ in model.named_modules()):
        return {HELD_BY: type(model).__name__}
    own = json.loads(config.to_json_string())
    return {**own, "architectures": [type(model).__name__.removeprefix("FSDP")]}  # as save_pretrained says


def _real(part: Tensor) -> Tensor:
    """The same numbers with an order: complex ones as real pairs, 8-bit floats as fp32."""
    if part.is_complex():
        return torch.view_as_real(part)
    return part.float() if part.is_floating_point() and part.itemsize == 1 else part


def _of_model(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of the model's parameters and buffers, by their names in a save."""
    own = (name for name in tensors if name.startswith("model.") and not is_extra_state(name))
    return {name: (tensors[name].shape, tensors[name].dtype) for name in own}


def _check_model(model: nn.Module) -> None:
    """Raise UserError if ``model`` saves something in its state_dict that it cannot load."""
    for name, module in model.named_modules():
        kind = type(module)
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is nn.Module.set_extra_state:
            raise UserError(
                f"{name or 'the model'}, a {kind.__name__}, has get_extra_state without set_extra_state: it "
                "would be saved and could not be resumed"
            )
    held = dict(every_parameter(model)) | dict(named_buffers(model))
    local = {name: to_local(tensor) for name, tensor in held.items()}
    before = bit_sums(local.items())
    try:
        load_model_state(model, model_state(model))  # hooks of users may rename, leave out or convert
        changed = changed_bits(before, local.items())
        problem = f"other values come back of {first_five(changed)}" if changed else ""
    except Exception as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem:
        raise UserError(
            "the model's load_state_dict() does not restore its state_dict(), so no checkpoint of it could "
            f"be resumed: {printable(problem)}; look at hooks that rename, leave out or convert tensors"
        )


# ---- a checkpoint for a run


def targets_for(
    state: TrainState, shapes: Shapes, plain: Mapping[str, Any], left_out: Collection[str] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors to read a checkpoint into, by their saved names; and what it lacks, in words for the log.

    These are the model's own tensors, its other buffers if they were saved in the same size, and new tensors
    for the optimizer's state: laid out and sharded like the parameter if they have its shape, otherwise on
    the CPU, from where ``Optimizer.load_state_dict`` moves them.

    Args:
        shapes: of the checkpoint's tensors.
        plain: the JSON part of the saved state.
        left_out: names of parameters that it leaves out.

    Raises:
        UserError: the checkpoint is of another model or optimizer; lists the first five differences of each
            kind.
    """
    ours, lacks = state.state_dict(), []
    targets = model_targets(ours["model"], shapes, left_out)
    _compare_optimizers(state, ours["optimizer"]["param_groups"], plain["optimizer"]["param_groups"])
    buffers = {f"buffers.{name}": value for name, value in ours["buffers"].items()}
    fitting = {name: value for name, value in buffers.items() if _fits(name, value, shapes)}
    if others := sorted(name.partition(".")[2] for name in buffers.keys() - fitting.keys()):
        lacks.append(f"these buffers, or has others; they keep their initial values: {first_five(others)}")
    averages = {f"ema.weights.{name}": value for name, value in ours["ema"].get("weights", {}).items()}
    if not all(_fits(name, value, shapes) for name, value in averages.items()):
        averages = {}
    if state.average is not None and not averages:
        lacks.append("averages of these weights (ema.decay); they begin with its weights")
    targets |= fitting | averages
    for name, (shape, dtype) in shapes.items():
        if name not in targets and not name.startswith(("buffers.", "ema.")):
            parameter = parameter_of(name, shape, state.trained.whole)
            if parameter is not None and parameter.shape == shape and len(shape) > 0:  # "step" is on the CPU
                targets[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                targets[name] = torch.empty(shape, dtype=dtype)
    return targets, lacks


def model_targets(
    ours: Mapping[str, Any], shapes: Shapes, left_out: Collection[str] = ()
) -> dict[str, Tensor]:
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
    _compare_shapes(
        {name: shape for name, shape in saved.items() if name not in kept},
        {n: (own[n].shape, own[n].dtype) for n in own if n.removeprefix("model.") not in left_out},
    )
    return own | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kept.items()}


def saved_state(plain: Mapping[str, Any], targets: Mapping[str, Tensor]) -> dict[str, Any]:
    """The saved state for ``TrainState.load_state_dict``, made of ``plain`` and ``targets``, once read."""
    buffers = plain["buffers"]
    read = {name: value for name, value in buffers.items() if f"buffers.{name}" in targets}
    average = plain["ema"] if any(name.startswith("ema.") for name in targets) else {}
    saved: dict[str, Any] = put_together({**plain, "buffers": read, "ema": average}, targets)
    return saved


def parameter_of(name: str, shape: torch.Size, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter to whose state the optimizer's tensor ``name`` belongs, maybe in lists; None without one.

    Raises:
        UserError: it is sharded, and the tensor has another shape.
    """
    prefix = name.removeprefix("optimizer.state.")
    while prefix and prefix not in parameters:
        prefix = prefix.rpartition(".")[0]
    parameter = parameters.get(prefix)
    if is_dtensor(parameter) and len(shape) > 0 and shape != parameter.shape:
        words = "has another shape than its parameter and cannot be sharded; resume, or begin, without FSDP"
        raise UserError(f"{name} {words}")
    return parameter


def frozen_digests(model: nn.Module, initial: Mapping[int, Tensor]) -> dict[str, str]:
    """The sha256 of each frozen parameter of `model` that `model.init_from` gave, under each of its names.

    Called when parameters have their final names and are frozen; before the model is sharded.

    Args:
        initial: by the id of a parameter, the tensor that `trainer.build.begin` found for it.
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
            "optim.groups, optim.weight_decay and optim.undecayed must be those of the checkpoint"
        )
    for group in mine:
        then = there[group["params"][0]]
        missing = group.keys() - then.keys() - OF_SCHEDULES - {"name"}
        missing |= {option for option in _WITH_STATE if group.get(option) and not then.get(option)}
        if missing:
            words = first_five(sorted(missing))
            raise UserError(f"the checkpoint is of another optimizer, without {words}; set optim as it was")


def _fits(name: str, tensor: Tensor, shapes: Shapes) -> bool:
    return shapes.get(name) == (tensor.shape, tensor.dtype)


def _compare_shapes(
    saved: Shapes,
    wanted: Shapes,
    words: str = "the checkpoint is of another model",
    sides: tuple[str, str] = ("there", "here"),
    way_out: str = "",
) -> None:
    """Raise UserError unless names, shapes and dtypes are equal; shows the first five differences.

    Args:
        words: the beginning of the message.
        sides: what ``saved`` and ``wanted`` are called in it.
        way_out: the end of the message.
    """
    problems = []
    if missing := sorted(set(wanted) - set(saved)):
        problems.append(f"it lacks {first_five(missing)}")
    if unexpected := sorted(set(saved) - set(wanted)):
        problems.append(f"it also holds {first_five(unexpected)}")
    if different := [name for name in wanted if name in saved and saved[name] != wanted[name]]:
        pairs = [
            f"{name} ({_describe(*saved[name])} {sides[0]}, {_describe(*wanted[name])} {sides[1]})"
            for name in different
        ]
        problems.append(f"these differ: {first_five(pairs)}")
    if problems:
        raise UserError(f"{words}: {'; '.join(problems)}{way_out}")


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


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
