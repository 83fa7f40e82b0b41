"""Writing a checkpoint: the files of tensors, each by one rank, then state.json and the manifest."""

import collections
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint.hashing import FileDigest, write_text
from trainer.checkpoint.layout import Plan, aliases_in, index_to_json, key_of, plan_writers
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, read_state_file
from trainer.checkpoint.safetensors_files import ToStore, write_file
from trainer.checkpoint.state_file import STATE
from trainer.checkpoint.store import Store
from trainer.distributed.agreement import Agreement
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.errors import Fault, UserError
from trainer.local_shard import num_rows, to_local


@dataclass
class SaveLayout:
    """Where each tensor of a save will be.

    Attributes:
        format: "full" or "sharded", for the manifest.
        index: as state.json has it, in JSON; on rank 0.
        of: for which tensors of this rank it was made: names, shapes, dtypes, and names of one tensor.
        was_read: whether a save with it was opened, and its files were as the index says.
    """

    format: str
    plan: Plan
    index: str
    of: Any = None
    was_read: bool = False


def layout_of(
    tensors: Mapping[str, Tensor],
    format: str,
    agreement: Agreement,
    only_rank_0: Collection[str] = (),
    former: SaveLayout | None = None,
) -> SaveLayout:
    """Share the live ``tensors`` among ranks (a collective). ``only_rank_0`` is as for `plan_writers`.

    Args:
        former: that of the save before; returned if it fits. To make a layout for the 40,000 tensors of
            10,000 parameters, and to read it back, takes as long as all the rest.
    """
    of = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()], aliases_in(tensors)
    if former is not None and all(agreement.gather(former.of == of)):
        return former
    gathered = format == "full" and agreement.world_size > 1
    plan = plan_writers(tensors, only_rank_0, gathered, agreement)
    index = json.dumps(index_to_json(plan.index(tensors))) if agreement.rank == 0 else ""
    return SaveLayout(format, plan, index, of)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint will hold.

    Attributes:
        tensors: those that this rank writes, or sends, by their names in the checkpoint.
        facts: all else, as STATE has it.
        metrics: for the manifest.
    """

    step: int
    layout: SaveLayout
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    metrics: Mapping[str, float]

    def write_tensors(self, directory: Path, agreement: Agreement) -> dict[str, FileDigest]:
        """Write this rank's tensors, hashed on the way and fsynced; return the digests by file.

        If rank 0 writes all, this is a collective, which sends CPU tensors. Shards and GPU tensors then
        arrive while the file is written, so that rank 0 holds only its own part of the state and one shard
        more. Other ranks send even if writing fails on rank 0.

        Raises:
            OSError: of the disk.
        """
        plan, tensors, rank = self.layout.plan, self.tensors, agreement.rank
        coming = {
            name: _chunks(tensors[name], plan, agreement.group) for name in plan.writers if name in tensors
        }
        files = files_of(tensors, plan, rank, coming.__getitem__)
        try:
            return {name: write_file(directory / name, stored) for name, stored in files.items()}
        finally:
            if plan.gathered:
                for chunks in coming.values():
                    collections.deque(chunks, maxlen=0)  # take part in the collectives that are left

    def read_back(self, directory: Path) -> None:
        """Raise UserError if no resume would read what was written to ``directory``."""
        if self.layout.was_read:
            read_state_file(directory)
        else:
            OpenCheckpoint.open(directory)
            self.layout.was_read = True


def write_checkpoint(store: Store, contents: Contents, agreement: Agreement, clears: bool = True) -> None:
    """Write a checkpoint, which appears in ``store`` whole or not at all (a collective).

    Args:
        clears: whether this rank deletes what a failure leaves: one on each host, since hosts may have no
            disk in common.

    Raises:
        UserError, Fault: on every rank alike; what was there before is unchanged.
    """
    directory = None
    try:
        directory = agreement.on_main(lambda: store.new_directory(contents.step))
        digests = agreement.everywhere(lambda: _write_part(directory, contents, agreement))
        files = {name: digest for part in agreement.gather(digests) for name, digest in part.items()}
        agreement.on_main(
            lambda: store.commit(
                contents.step, contents.layout.format, files, contents.metrics, check=contents.read_back
            )
        )
    except (UserError, Fault):
        if directory is not None and clears:
            store.delete_failed(directory)
        raise


def _write_part(directory: Path, contents: Contents, agreement: Agreement) -> dict[str, FileDigest]:
    digests = contents.write_tensors(directory, agreement)
    if agreement.rank == 0:
        text = f'{json.dumps(contents.facts)[:-1]}, "tensors": {contents.layout.index}}}'
        digests[STATE] = write_text(directory / STATE, text)
    return digests


def files_of(
    tensors: Mapping[str, Tensor], plan: Plan, rank: int, rows: Callable[[str], Iterable[Tensor]]
) -> dict[str, list[ToStore]]:
    """What this rank writes of `plan`, by file; `rows` gives what it holds of a tensor, by the name."""
    files: dict[str, list[ToStore]] = {}
    for name in plan.writers:
        if name in tensors and rank in plan.writers[name]:
            tensor = tensors[name]
            shape = tuple(tensor.shape if plan.gathered else to_local(tensor).shape)
            if num_rows(shape) or rank == plan.writers[name][0]:
                stored = ToStore(key_of(name), tensor.dtype, shape, rows(name))
                files.setdefault(plan.file_of(name, rank), []).append(stored)
    return files


def _chunks(tensor: Tensor, plan: Plan, group: torch_dist.ProcessGroup) -> Iterator[Tensor]:
    """The rows of `tensor` that arrive here, on the CPU, chunk by chunk; nothing happens before the first."""
    if plan.gathered:
        return gather_shards_to_rank0(tensor, "cpu", group)
    return (part.cpu() for part in (to_local(tensor),))
