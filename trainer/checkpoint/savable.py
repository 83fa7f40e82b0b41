"""Whether a resume can load what a run saves: its state as it is built, with which each save is compared."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.layout import DTYPES, Shapes
from trainer.checkpoint.tree import is_extra_state, take_apart
from trainer.errors import NonFiniteError, UserError, first_few, on_one_line
from trainer.files.untrusted import first_five, printable
from trainer.model.adapters import adapters_of
from trainer.model.plain_names import every_parameter, load_model_state, model_state, named_buffers
from trainer.state.train_state import TrainState
from trainer.tensors.bits import bit_sums, changed_bits
from trainer.tensors.local_shard import is_dtensor, to_local


class Savable:
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
        own = {f"model.{name}": value for name, value in tree["model"].items() if isinstance(value, Tensor)}
        for name, tensor in {**tensors, **own}.items():  # with those that are several, which it may not hold
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
        compare_shapes(
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
                "saved. Lower optim.lr, or set train.clip_grad_norm; the same run_dir with resume=auto "
                "continues from the checkpoint before",
                ranks=(rank,),
            )


def unsavable(tensor: Tensor) -> str | None:
    """Why a checkpoint cannot hold ``tensor``, or a resume cannot fill it, as the end of a sentence."""
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); make it dense, or persistent=False"
    if tensor.is_meta or tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter):
        return f"is on the meta device, nested or a {type(tensor).__name__}, not a plain tensor with numbers"
    if tensor.dtype not in DTYPES.values():
        return f"is of {tensor.dtype}, which no checkpoint holds; keep its bytes, with view(torch.uint8)"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: torch fills no tensor whose numbers share memory; add .clone()"
    return None


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config.json of a model of transformers; None for other models.

    A model that holds one of transformers, or has adapters within, is another model: its weights have other
    names than `from_pretrained` looks for.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(type(model), "base_model_prefix") or not hasattr(config, "to_json_string"):
        return None
    if any("base_layer" in name.split(".") for name, _ in model.named_modules()):
        return None
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
        problem = on_one_line(error)
    if problem:
        raise UserError(
            "the model's load_state_dict() does not restore its state_dict(), so no checkpoint of it could "
            f"be resumed: {printable(problem)}; look at hooks that rename, leave out or convert tensors"
        )


def compare_shapes(
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
