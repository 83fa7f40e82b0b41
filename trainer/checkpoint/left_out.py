"""Frozen parameters that checkpoints leave out (`checkpoint.frozen=false`): `model.init_from` has them."""

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.distributed.gather_shards import as_bytes
from trainer.errors import UserError
from trainer.files.untrusted import first_five
from trainer.optim.plain_names import every_parameter


def frozen_digests(model: nn.Module, begun_with: Mapping[int, Tensor]) -> dict[str, str]:
    """The sha256 of each frozen parameter of `model` that `model.init_from` gave, under each of its names.

    Called when parameters have their final names and are frozen; before the model is sharded.

    Args:
        begun_with: by the id of a parameter, the tensor that `trainer.build.start_from` found for it.
    """
    return {
        name: hashlib.sha256(as_bytes(begun_with[id(parameter)].to(parameter.dtype))).hexdigest()
        for name, parameter in every_parameter(model)
        if not parameter.requires_grad and id(parameter) in begun_with
    }


def check_left_out(source: OpenCheckpoint, begun: Mapping[str, str]) -> None:
    """Raise UserError unless a model with these `frozen_digests` began with what `source` leaves out."""
    others = [name for name, digest in source.left_out.items() if begun.get(name) != digest]
    if others:
        raise UserError(
            f"{source.directory} leaves out {first_five(others)}, as checkpoint.frozen=false has it: "
            f"{source.initial_weights} had other values for them, or is not read now; set model.init_from to "
            "those weights as they were, and model.freeze and checkpoint.frozen as in that run"
        )
