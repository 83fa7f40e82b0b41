"""What a run's saves must contain, known before its first step, so that a resume can load them."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.bits import same_bits
from trainer.checkpoint.layout import DTYPES
from trainer.checkpoint.matching import Shapes, compare_shapes, is_extra_state
from trainer.checkpoint.tree import take_apart
from trainer.errors import UserError
from trainer.files.untrusted import first_five, printable, reason
from trainer.local_shard import is_dtensor, to_local
from trainer.optim.plain_names import every_parameter, load_model_state, model_state, named_buffers
from trainer.optim.train_state import TrainState


class Expected:
    """The names, shapes and dtypes of the model's state as built, and which of its numbers are not finite.

    Attributes:
        not_finite: by the name of a tensor, which of "NaN" and "Inf" it holds from the start, as masks do; of
            this rank's shards, until `Checkpointer.expect` adds those of the others.
        model_config: the config.json of a Hugging Face model; None for other models.

    Raises:
        UserError: the model's state has a tensor that no checkpoint can hold or no resume can load; by name.
    """

    def __init__(self, state: TrainState) -> None:
        _check_model(state.model)
        tensors, _ = take_apart(state.state_dict())
        for name, tensor in tensors.items():
            if (problem := _unsavable(to_local(tensor))) is not None:
                raise UserError(f"a checkpoint cannot hold {name}, which {problem}")
        named = every_parameter(state.model)
        # Without DTensors: FSDP itself replaces them by gathered ones.
        self._parameters = {name: p for name, p in named if not is_dtensor(p)}
        self._shapes = _of_model(tensors)
        self.not_finite = not_finite(tensors)
        self.model_config = _config_of(state.model)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise UserError if a tensor of the model was created, resized or lost since; by names in saves."""
        compare_shapes(
            _of_model(tensors),
            self._shapes,
            "the model's state is no longer what it was before the first step, and no resume could load it",
            ("now", "then"),
            "; make buffers in __init__, in their final size, or with persistent=False if none need be saved",
        )

    def check_parameters(self, model: nn.Module) -> None:
        """Raise UserError if a parameter of ``model`` was replaced since: no optimizer would train it."""
        now = dict(every_parameter(model))
        replaced = [name for name, parameter in self._parameters.items() if now.get(name) is not parameter]
        if replaced:
            raise UserError(
                f"{first_five(replaced)} of the model is another object than before the first step: the "
                "optimizer still updates the old one. Replace no parameter in a forward pass; make it in "
                "__init__, and change its values under torch.no_grad()"
            )

    def new_in(self, tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
        """By name, which of "NaN" and "Inf" this process holds in ``tensors``, and did not at the start."""
        known = {name: tensors[name] for name in tensors.keys() & self.not_finite.keys()}
        others = {name: tensors[name] for name in tensors if name not in known}
        found = {name: kinds - self.not_finite[name] for name, kinds in not_finite(known).items()}
        return not_finite(others) | {name: kinds for name, kinds in found.items() if kinds}


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """By name, which of "NaN" and "Inf" are among the numbers that this process holds of ``tensors``.

    If all are finite, this costs one read of them, and one wait for each device; {} is returned.
    """
    here = {name: _real(to_local(tensor)) for name, tensor in tensors.items()}
    here = {name: part for name, part in here.items() if part.numel() and part.is_floating_point()}
    # Both extremes are NaN if any number is: five times as fast as isfinite, which allocates as much memory.
    ends: dict[torch.device, list[Tensor]] = {}
    for part in here.values():
        ends.setdefault(part.device, []).extend(part.aminmax())
    if all(torch.stack(of_device).isfinite().all() for of_device in ends.values()):
        return {}
    kinds = {"NaN": torch.isnan, "Inf": torch.isinf}
    found = {
        name: {kind for kind, is_such in kinds.items() if is_such(part).any()} for name, part in here.items()
    }
    return {name: held for name, held in found.items() if held}


def unusual(tensor: Tensor) -> str | None:
    """Why a checkpoint cannot hold ``tensor``, as the end of a sentence; None if it can."""
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); save it dense, with to_dense()"
    if tensor.is_meta:
        return "is on the meta device: it was saved without its numbers"
    if tensor.is_nested or tensor.is_quantized or type(tensor) not in (Tensor, nn.Parameter):
        return f"is nested, quantized or a {type(tensor).__name__}, not a plain tensor"
    return None


def _unsavable(tensor: Tensor) -> str | None:
    """As `unusual`, of a tensor that a resume has to read and to fill."""
    if (problem := unusual(tensor)) is not None:
        return problem
    if tensor.dtype not in DTYPES.values():
        return f"is of {tensor.dtype}, which no checkpoint holds; keep its bytes, with view(torch.uint8)"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: torch fills no tensor whose numbers share memory; add .clone()"
    return None


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config.json of a Hugging Face model; None for other models."""
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "model_type", None), str) or not hasattr(config, "to_json_string"):
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
    try:
        saved = model_state(model)
    except Exception as error:  # of a user's hook
        words = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"the model's state_dict() cannot be saved: {words}; look at its hooks") from error
    parameters = dict(every_parameter(model))
    held = parameters | dict(named_buffers(model))
    own = {name: value for name, value in saved.items() if not is_extra_state(name)}
    is_plain = all(name in held and _is_own(value, held[name]) for name, value in own.items())
    if not is_plain or not parameters.keys() <= own.keys():  # a hook had a hand in it
        _try_to_restore(model, saved, held)


def _is_own(value: Any, live: Tensor) -> bool:
    """Whether ``value`` of a state dict is the model's own tensor, not one that a hook created."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (live.shape, live.dtype):
        return False
    return to_local(value).data_ptr() == to_local(live).data_ptr()


@torch.no_grad()
def _try_to_restore(model: nn.Module, saved: dict[str, Any], held: Mapping[str, Tensor]) -> None:
    """Raise UserError unless ``model`` loads ``saved`` unchanged; ``held`` keeps its values in any case."""
    before = {name: tensor.clone() for name, tensor in held.items()}
    try:
        load_model_state(model, saved)
        changed = [name for name in held if not same_bits(to_local(held[name]), to_local(before[name]))]
        problem = f"other values come back of {first_five(changed)}" if changed else ""
    except Exception as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    for name, tensor in held.items():
        tensor.copy_(before[name])
    if problem:
        raise UserError(
            "the model's load_state_dict() does not restore its state_dict(), so no checkpoint of it could "
            f"be resumed: {printable(problem)}; look at hooks that rename, leave out or convert tensors"
        )
