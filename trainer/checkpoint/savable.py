"""Check that a resume can load what a run saves, by comparing each save with the initial state."""

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
    """The names, shapes and dtypes that each save of a run must contain, so that a resume can load it.

    Args:
        left_out: the names of frozen parameters that are not saved.

    Attributes:
        not_finite: the names of tensors that contain NaN or Inf from the start, such as masks.
            `Checkpointer.bind` adds those of other ranks.
        model_config: the config.json of a Hugging Face model; None for other models.
        adapters: the result of `adapters_of` for the model.

    Raises:
        UserError: if a tensor of the model's state cannot be saved or restored.
    """

    def __init__(self, state: TrainState, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        tree, left_out_tensors = self._split(state)
        self._left_out_bits = bit_sums(left_out_tensors.items())
        tensors, _ = take_apart(tree)
        own = {f"model.{name}": value for name, value in tree["model"].items() if isinstance(value, Tensor)}
        for name, tensor in {**tensors, **own}.items():  # `own` has the subclasses that `take_apart` splits
            if (problem := unsavable(to_local(tensor))) is not None:
                raise UserError(f"{name} cannot be saved, because it {problem}")
        _check_model(state.model)
        named = every_parameter(state.model)
        # Without DTensors, because FSDP itself replaces them with gathered parameters.
        self._parameters = {name: p for name, p in named if not is_dtensor(p)}
        self._shapes = _of_model(tensors)
        self.not_finite = set(not_finite(tensors))
        self.model_config = _config_of(state.model)
        self.adapters = adapters_of(state.model)

    def to_save(
        self, state: TrainState, kept: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of ``state``, by their names in a checkpoint, and its other values for JSON.

        Args:
            kept: values to save in place of the model's current ones, by their names in the model's state.

        Raises:
            UserError: if a parameter was replaced, or a tensor of the model was created, resized or removed.
        """
        now = dict(every_parameter(state.model))
        replaced = [name for name, parameter in self._parameters.items() if now.get(name) is not parameter]
        if replaced:
            raise UserError(
                f"parameters were replaced after the model was built: {first_five(replaced)}. The optimizer "
                "still updates the old parameters. Create parameters in __init__ only, and change their "
                "values in place under torch.no_grad()"
            )
        tree, left_out_tensors = self._split(state)
        if changed := changed_bits(self._left_out_bits, left_out_tensors.items()):
            raise UserError(
                f"frozen parameters no longer have the values in model.init_from: {first_five(changed)}; "
                "set checkpoint.frozen=true to save them"
            )
        if kept is not None:
            for part in ("model", "buffers"):
                tree[part] = {name: kept.get(name, value) for name, value in tree[part].items()}
        tensors, plain = take_apart(tree)
        compare_shapes(
            _of_model(tensors),
            self._shapes,
            "the layout of the model's state has changed, so a resume could not load it",
            ("now", "before"),
            "; create buffers in __init__ with their final size, or use persistent=False if they need not be "
            "saved",
        )
        return tensors, plain

    def _split(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tree = state.state_dict()
        return tree, {name: to_local(tree["model"].pop(name)) for name in self._left_out}

    def new_in(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of ``tensors`` that contain NaN or Inf now, but did not at the start."""
        return not_finite({name: tensors[name] for name in tensors if name not in self.not_finite})


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of ``tensors`` that contain NaN or Inf; for sharded tensors, in this rank's shard."""
    local = {name: _real(to_local(tensor)) for name, tensor in tensors.items()}
    local = {name: part for name, part in local.items() if part.numel() and part.is_floating_point()}
    # aminmax gives NaN if any value is NaN, and is five times as fast as isfinite, which allocates memory.
    extremes: dict[torch.device, list[Tensor]] = {}
    for part in local.values():
        extremes.setdefault(part.device, []).extend(part.aminmax())
    if all(torch.stack(of_device).isfinite().all() for of_device in extremes.values()):
        return []
    return [name for name, part in local.items() if not part.isfinite().all()]


def refuse_not_finite(not_finite: Sequence[Sequence[str]], step: int, descriptions: Sequence[str]) -> None:
    """Raise NonFiniteError if a rank reports tensors with NaN or Inf."""
    for rank, names in enumerate(not_finite):
        if names:
            shown = first_few((name.removeprefix("model.") for name in names), 1)
            raise NonFiniteError(
                f"{shown} contains NaN or Inf after step {step} on {descriptions[rank]}, so no checkpoint "
                "of this step was saved. Lower optim.lr, or set train.clip_grad_norm; the same run_dir with "
                "resume=auto continues from the previous checkpoint",
                ranks=(rank,),
            )


def unsavable(tensor: Tensor) -> str | None:
    """Return why ``tensor`` cannot be saved or restored, as the end of a sentence; None if it can be."""
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"is sparse ({layout}); make it dense, or set persistent=False"
    if tensor.is_meta or tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter):
        kind = "nested" if tensor.is_nested else f"a {type(tensor).__name__}"
        return f"is {'on the meta device' if tensor.is_meta else kind}; use a plain tensor with values"
    if tensor.dtype not in DTYPES.values():
        return f"is {tensor.dtype}, which checkpoints do not support; store its bytes: .view(torch.uint8)"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, and torch cannot fill tensors whose elements share memory; add .clone()"
    return None


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the config.json of a transformers model; None for other models.

    Models that wrap a transformers model or contain adapters count as other models: `from_pretrained` would
    not recognize the names of their weights.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(type(model), "base_model_prefix") or not hasattr(config, "to_json_string"):
        return None
    if any("base_layer" in name.split(".") for name, _ in model.named_modules()):
        return None
    own = json.loads(config.to_json_string())
    return {**own, "architectures": [type(model).__name__.removeprefix("FSDP")]}  # as save_pretrained does


def _real(part: Tensor) -> Tensor:
    """Return values that torch can compare: pairs for complex numbers, fp32 for 8-bit floats."""
    if part.is_complex():
        return torch.view_as_real(part)
    return part.float() if part.is_floating_point() and part.itemsize == 1 else part


def _of_model(tensors: Mapping[str, Tensor]) -> Shapes:
    own = (name for name in tensors if name.startswith("model.") and not is_extra_state(name))
    return {name: (tensors[name].shape, tensors[name].dtype) for name in own}


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module)
        has_extra_state = kind.get_extra_state is not nn.Module.get_extra_state
        if has_extra_state and kind.set_extra_state is nn.Module.set_extra_state:
            raise UserError(
                f"{name or 'the model'}, a {kind.__name__}, defines get_extra_state but not set_extra_state, "
                "so its extra state could be saved but not restored; define both"
            )
    tensors = dict(every_parameter(model)) | dict(named_buffers(model))
    local = {name: to_local(tensor) for name, tensor in tensors.items()}
    before = bit_sums(local.items())
    try:
        load_model_state(model, model_state(model))  # users' hooks may rename, drop or convert tensors
        changed = changed_bits(before, local.items())
        problem = f"the values of {first_five(changed)} change" if changed else ""
    except Exception as error:
        problem = on_one_line(error)
    if problem:
        raise UserError(
            "the model's load_state_dict() does not restore its state_dict(), so a run could not be "
            f"resumed from its checkpoints: {printable(problem)}; check hooks that rename, drop or convert "
            "tensors"
        )


def compare_shapes(
    saved: Shapes,
    wanted: Shapes,
    summary: str = "the checkpoint is from a different model",
    sides: tuple[str, str] = ("saved", "here"),
    way_out: str = "",
) -> None:
    """Raise UserError unless names, shapes and dtypes are equal. The message lists up to five of each kind.

    Args:
        sides: the labels of ``saved`` and ``wanted`` in the message.
    """
    problems = []
    if missing := sorted(set(wanted) - set(saved)):
        problems.append(f"missing {first_five(missing)}")
    if unexpected := sorted(set(saved) - set(wanted)):
        problems.append(f"unexpected {first_five(unexpected)}")
    if different := [name for name in wanted if name in saved and saved[name] != wanted[name]]:
        pairs = [
            f"{name} ({_describe(*saved[name])} {sides[0]}, {_describe(*wanted[name])} {sides[1]})"
            for name in different
        ]
        problems.append(f"different {first_five(pairs)}")
    if problems:
        raise UserError(f"{summary}: {'; '.join(problems)}{way_out}")


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
