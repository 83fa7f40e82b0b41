"""checkpoint.frozen=false: checkpoints leave out frozen parameters, which are where the run began."""

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.errors import UserError
from trainer.files.untrusted import first_five
from trainer.model.plain_names import every_parameter
from trainer.tensors.bits import as_bytes


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
