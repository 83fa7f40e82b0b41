"""Whether this run can load a checkpoint's values: none is missing, and each replaces one of its kind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from trainer.checkpoint.matching import parameter_of, saved_state
from trainer.errors import UserError
from trainer.files.untrusted import first_five, printable
from trainer.optim.combined import has_user_part, parts_of
from trainer.optim.train_state import TrainState
from trainer.optim.whole_matrices import WholeMatrices


def check_fits(state: TrainState, plain: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Raise UserError if something is missing in the saved state, or a value has another type than here."""
    ours, saved = state.state_dict(), saved_state(plain, targets)
    _compare_kinds(saved["ema"], ours["ema"], "ema", required=ours["ema"].keys() if saved["ema"] else ())
    if saved["model"].keys() != ours["model"].keys():
        raise UserError("the checkpoint is of another model: its state does not name this model's tensors")
    foreign = [str(key) for key in saved["optimizer"]["state"] if key not in state.trained.whole]
    if foreign and not has_user_part(state.optimizer):  # which may keep state of no parameter
        raise UserError(
            f"the checkpoint's optimizer has state of unknown parameters: {first_five(sorted(foreign))}"
        )
    for name in saved["optimizer"]["state"].keys() & state.trained.whole.keys():
        _compare_kinds(saved["optimizer"]["state"][name], {}, f"optimizer.state.{name}")
    _check_optimizer_state(state, ours["optimizer"]["param_groups"], saved["optimizer"])
    _compare_kinds(saved["optimizer"]["param_groups"], ours["optimizer"]["param_groups"], "param_groups")
    if state.scaler.is_enabled() and saved["scaler"]:
        _compare_kinds(saved["scaler"], ours["scaler"], "scaler", required=ours["scaler"].keys())
    if saved["settings"] == ours["settings"]:  # else it is not loaded: it follows from the new ones
        schedule = {"last_epoch", "_step_count", "base_lrs"} & ours["schedule"].keys()
        _compare_kinds(saved["schedule"], ours["schedule"], "schedule", required=schedule)
        own = set(dir(type(state.schedule))) | {"optimizer"}
        if hidden := sorted(own & (saved["schedule"].keys() - ours["schedule"].keys())):
            raise UserError(f"the checkpoint's schedule would replace {first_five(hidden)}")
    _compare_kinds(saved["progress"], ours["progress"], "progress", required=ours["progress"].keys())
    _compare_kinds(saved.get("early_end", {}), ours["early_end"], "early_end")


def check_resumable(state: TrainState, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Raise UserError if a resume of this run could not load the optimizer's part of what it saves."""
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            parameter_of(name, tensor.shape, state.trained.whole)
    check_fits(state, facts["state"], tensors)


def _check_optimizer_state(
    state: TrainState, ours: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """Raise UserError if a parameter's state lacks what a step of the optimizer creates, or has other shapes.

    A step on a small parameter, of size 2 in each dimension, shows what it creates. Only for torch's own
    optimizers: others may treat parameters differently.
    """
    for part, group in zip(parts_of(state.optimizer), ours, strict=True):
        kind = Muon if isinstance(part, WholeMatrices) else type(part)
        if not kind.__module__.startswith("torch.optim."):
            continue
        made: dict[int, dict[str, Any]] = {}
        for name in group["params"]:
            found, shape = saved["state"].get(name), state.trained.whole[name].shape
            if not found:  # it never had a gradient
                continue
            if len(shape) not in made:
                made[len(shape)] = _state_after_one_step(kind, group, len(shape))
            for key, value in made[len(shape)].items():
                where = f"optimizer.state.{name}.{key}"
                if key not in found:
                    raise UserError(
                        f"the checkpoint lacks {printable(where)}, which {kind.__name__} keeps with this "
                        "run's settings; set optim as it was"
                    )
                _compare_kinds(found[key], value, where)
                like_parameter = getattr(value, "shape", ()) == (2,) * len(shape)
                if like_parameter and getattr(found[key], "shape", None) != shape:
                    raise UserError(
                        f"the checkpoint's {printable(where)} does not have its parameter's shape"
                    )


def _state_after_one_step(kind: type[Any], group: Mapping[str, Any], ndim: int) -> dict[str, Any]:
    """The state that an optimizer of class ``kind`` keeps for a parameter of shape (2,) * ``ndim``.

    {} if a step here fails.
    """
    parameter = torch.zeros((2,) * ndim, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = kind([{**group, "params": [parameter]}])
        optimizer.step()
    except Exception:  # it needs a closure, sparse gradients or a GPU: the run's own step will show errors
        return {}
    return dict(optimizer.state[parameter])


def _compare_kinds(saved: Any, ours: Any, where: str, required: Iterable[str] = ()) -> None:
    """Raise UserError unless ``saved`` can replace ``ours``: numbers for numbers, texts for texts.

    None can replace anything. Of two mappings only the common keys are compared, but ``required`` must exist.
    """
    number = (bool, int, float, Tensor)
    if saved is None or ours is None or (isinstance(saved, number) and isinstance(ours, number)):
        return
    if isinstance(saved, Mapping) and isinstance(ours, Mapping):
        if missing := sorted(set(required) - set(saved)):
            raise UserError(f"the checkpoint's {where} lacks {first_five(missing)}")
        for key in saved.keys() & ours.keys():
            _compare_kinds(saved[key], ours[key], f"{where}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(ours, list | tuple):
        # How many there are is a setting (milestones) or follows from the parameter groups.
        if len(saved) != len(ours) and (isinstance(ours, tuple) or where.endswith("lrs")):
            raise UserError(f"the checkpoint's {where} has {len(saved)} values, this run's {len(ours)}")
        for index, item in enumerate(saved):
            _compare_kinds(item, ours[min(index, len(ours) - 1)] if ours else None, f"{where}.{index}")
    elif type(saved) is not type(ours):
        theirs, own = printable(repr(saved)), printable(repr(ours))
        raise UserError(f"the checkpoint's {printable(where)} is {theirs}, this run's {own}")
