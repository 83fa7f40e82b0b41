"""A checkpoint opened for reading: its facts and its tensors, in either format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint import full, sharded
from trainer.checkpoint.matching import Shapes
from trainer.checkpoint.store import read_manifest
from trainer.checkpoint.tree import put_together
from trainer.errors import UserError

STATE, RNG = "state.json", "rng.pt"


@dataclass(frozen=True)
class Source:
    """What ``open`` found in a directory that was verified before.

    Attributes:
        facts: strategy, world_size, torch_version, config, and the JSON parts of the state and of the RNG.
        shapes: of every tensor, by its name.
    """

    directory: Path
    facts: dict[str, Any]
    shapes: Shapes
    _mapped: Mapping[str, Tensor] | None  # of a full checkpoint, read when touched

    @classmethod
    def open(cls, directory: Path) -> "Source":
        """Read all but the tensors. UserError if ``directory`` cannot be seen from here or holds other
        things."""
        format = read_manifest(directory).format
        try:
            facts = json.loads((directory / STATE).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{directory / STATE} is not readable: {error}") from error
        if format == "sharded":
            return cls(directory, facts, sharded.shapes(directory), None)
        if format != "full":
            raise UserError(f"{directory} has the format {format!r}, this one reads full and sharded")
        mapped = full.open_tensors(directory / full.TENSORS)
        return cls(directory, facts, {name: (t.shape, t.dtype) for name, t in mapped.items()}, mapped)

    def read_into(self, targets: dict[str, Tensor], group: torch_dist.ProcessGroup | None) -> None:
        """Fill ``targets``, whole or sharded in any layout. Collective over ``group``; None reads alone."""
        if self._mapped is None:
            sharded.read_into(self.directory, targets, group)
        else:
            full.copy_into(targets, self._mapped)

    def rng(self, rank: int) -> dict[str, Any]:
        """What ``seeding.rng_state`` gave on ``rank``."""
        return put_together(self.facts["rng"][str(rank)], full.open_tensors(self.directory / RNG))

    def model_weights(self) -> dict[str, Tensor]:
        """The model's whole tensors by their names in the model, without a process group."""
        weights = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in self.shapes.items()
            if name.startswith("model.")
        }
        self.read_into(weights, None)
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}
