"""Writing a checkpoint: the files of tensors, each by one rank, then state.json and the manifest."""

import collections
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.hashing import FileDigest, write_text
from trainer.checkpoint.layout import Plan, index_to_json, key_of, plan_writers
from trainer.checkpoint.open_checkpoint import STATE, OpenCheckpoint
from trainer.checkpoint.safetensors_files import ToStore, write_file
from trainer.checkpoint.store import Store
from trainer.distributed.agreement import Agreement
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.errors import Fault, UserError
from trainer.local_shard import num_rows, to_local


@dataclass
class SaveLayout:
    """Where each tensor of a save will be: kept for the next save, which mostly has the same tensors.

    To make one for the 40,000 tensors of 10,000 parameters takes as long as the rest of a save.

    Attributes:
        format: "full" or "sharded", for the manifest.
        index: as state.json has it, in JSON; on rank 0.
        was_read: whether a save with it was opened, and its files were as the index says.
    """

    format: str
    plan: Plan
    index: str
    was_read: bool = False


def layout_of(
    tensors: Mapping[str, Tensor],
    format: str,
    agreement: Agreement,
    only_rank_0: Collection[str] = (),
    alike: bool = True,
) -> SaveLayout:
    """Share the live ``tensors`` among ranks. ``only_rank_0`` and ``alike`` are as for `plan_writers`."""
    gathered = format == "full" and agreement.world_size > 1
    plan = plan_writers(tensors, only_rank_0, gathered, alike, agreement.world_size)
    index = json.dumps(index_to_json(plan.index(tensors))) if agreement.rank == 0 else ""
    return SaveLayout(format, plan, index)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint will hold.

    Attributes:
        tensors: those that this rank writes, or sends, by their names in the checkpoint.
        facts: all else, as STATE has it; on rank 0.
        metrics: for the manifest.
        copies: of the tensors, to be written in their place.
    """

    step: int
    layout: SaveLayout
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    metrics: Mapping[str, float]
    copies: Future[dict[str, Tensor]] | None = None

    def write_tensors(self, directory: Path, agreement: Agreement) -> dict[str, FileDigest]:
        """Write this rank's tensors, hashed on the way and fsynced; return the digests by file.

        If rank 0 writes all, this is a collective, which sends CPU tensors. Shards and GPU tensors then
        arrive while the file is written, so that rank 0 holds only its own part of the state and one shard
        more. A rank that fails takes part to the end, so that the others hear of it.

        Raises:
            OSError: the disk failed.
        """
        plan, rank, group = self.layout.plan, agreement.rank, agreement.group
        names = [name for name in plan.writers if name in self.tensors]
        if not plan.gathered:
            tensors = self._to_write()
            files = _files_of(tensors, plan, rank, lambda name: map(Tensor.cpu, [to_local(tensors[name])]))
            return {name: write_file(directory / name, stored) for name, stored in files.items()}

        def coming(tensors: Mapping[str, Tensor], lost: bool = False) -> dict[str, Iterator[Tensor]]:
            return {name: gather_shards_to_rank0(tensors[name], "cpu", group, lost) for name in names}

        left = coming(self.tensors, lost=True)
        try:
            tensors = self._to_write()
            rows = coming(tensors)
            if rank != 0:
                for name in names:
                    collections.deque(rows[name], maxlen=0)
                    del left[name]
                return {}
            left = rows
            files = _files_of(tensors, plan, rank, rows.__getitem__)
            return {name: write_file(directory / name, stored) for name, stored in files.items()}
        finally:
            for rest in left.values():
                collections.deque(rest, maxlen=0)

    def _to_write(self) -> Mapping[str, Tensor]:
        return self.tensors if self.copies is None else self.copies.result()


def write_checkpoint(
    store: Store, directory: Path, contents: Contents, agreement: Agreement, clears: bool = True
) -> None:
    """Write a checkpoint, which appears in ``store`` whole or not at all (a collective).

    Args:
        directory: from ``store.new_directory``.
        clears: whether this rank deletes what a failure leaves: one on each host, since hosts may have no
            disk in common.

    Raises:
        UserError, Fault: on every rank alike; what was there before is unchanged.
    """
    layout = contents.layout

    def write() -> dict[str, FileDigest]:
        digests = contents.write_tensors(directory, agreement)
        if agreement.rank == 0:
            text = f'{json.dumps(contents.facts)[:-1]}, "tensors": {layout.index}}}'
            digests[STATE] = write_text(directory / STATE, text)
        return digests

    def read_back(sealed: Path) -> None:
        """Raise UserError if no resume would read what was written."""
        if not layout.was_read:
            OpenCheckpoint.open(sealed)
            layout.was_read = True

    def commit(digests: list[dict[str, FileDigest]]) -> None:
        files = {name: digest for part in digests for name, digest in part.items()}
        store.commit(contents.step, layout.format, files, contents.metrics, check=read_back)

    try:
        agreement.decided(write, commit)
    except (UserError, Fault):
        if clears:
            store.delete_failed(directory)
        raise


def _files_of(
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
