"""A checkpoint opened for reading: its facts and its tensors, in either format."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint import full, sharded
from trainer.checkpoint.matching import Shapes
from trainer.checkpoint.store import Manifest, read_manifest
from trainer.checkpoint.tree import put_together
from trainer.errors import UserError

STATE, RNG = "state.json", "rng.pt"


@dataclass(frozen=True)
class Source:
    """What ``open`` found in a directory that was verified before.

    Attributes:
        facts: strategy, world_size, torch_version, config, and the JSON parts of the state and of the RNG.
        shapes: of every tensor, by its name.
        read_into: fills the tensors it is given (whole, or sharded in any layout) by their names. Collective
            over the process group that it is given too; None reads alone.
    """

    directory: Path
    manifest: Manifest
    facts: dict[str, Any]
    shapes: Shapes
    read_into: Callable[[dict[str, Tensor], torch_dist.ProcessGroup | None], None]

    @classmethod
    def open(cls, directory: Path) -> "Source":
        """Read all but the tensors. UserError if ``directory`` is not seen from here, or is no such thing."""
        manifest = read_manifest(directory)
        try:
            facts = json.loads((directory / STATE).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{directory / STATE} is not readable: {error}") from error
        if manifest.format == "sharded":
            metadata = sharded.read_metadata(directory)
            read = partial(sharded.read_into, directory, metadata)
            return cls(directory, manifest, facts, sharded.shapes_of(metadata), read)
        if manifest.format != "full":
            raise UserError(f"{directory} has the format {manifest.format!r}; full and sharded are read here")
        mapped = full.open_tensors(directory / full.TENSORS)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in mapped.items()}
        return cls(directory, manifest, facts, shapes, lambda targets, group: full.copy_into(targets, mapped))

    def rng(self, rank: int) -> dict[str, Any]:
        """What ``seeding.rng_state`` gave on ``rank``."""
        return put_together(self.facts["rng"][str(rank)], full.open_tensors(self.directory / RNG))

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """The whole tensors whose names begin with ``prefix``, by the rest of it; needs no process group."""
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in self.shapes.items()
            if name.startswith(prefix)
        }
        self.read_into(tensors, None)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
