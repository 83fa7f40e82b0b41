"""Copies in memory of what each rank would write of a sharded checkpoint, and a save from them at a fault."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.expected import Expected
from trainer.checkpoint.hashing import FileDigest, HashingFile
from trainer.checkpoint.layout import (
    Plan,
    copies_of_shards,
    index_from_json,
    index_to_json,
    name_of,
    plan_of_shards,
)
from trainer.checkpoint.matching import first_five
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.safetensors_files import tensors_in
from trainer.checkpoint.slots import Copy, CopySlots, copies_in
from trainer.checkpoint.state_file import DATA_STATES
from trainer.checkpoint.tree import take_apart
from trainer.checkpoint.writing import Contents, files_of
from trainer.distributed.agreement import Agreement, gather_objects
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.files.untrusted import Fields
from trainer.local_shard import same_bits, to_local
from trainer.optim.train_state import TrainState, buffer_names

OWN_BUFFERS = "the model's running statistics, or other buffers, are those of rank 0"


class Mirror:
    """Keeps copies of this rank's part of the state, and opens those of the ranks that hold it together.

    Where the model is sharded in several groups, the first of each host keeps copies. Creating this is a
    collective; nothing else is.

    Args:
        every: of how many steps one is copied.
        own_buffers: whether ranks have different buffers, of which those of rank 0 are the model's.

    Raises:
        UserError: no such group is on this host, in one container; on every rank.
    """

    def __init__(self, dist: Dist, state: TrainState, every: int, own_buffers: bool) -> None:
        self._dist, self._state, self._every = dist, state, every
        self._slots = CopySlots(dist.device)
        self._plan: Plan | None = None
        self._layout: list[Any] = []
        self._index = ""
        tensors, _ = take_apart(state.state_dict())
        self._holders = self._holders_here(copies_of_shards(tensors))
        is_other_first = own_buffers and dist.rank == self._holders[0] != 0
        names = buffer_names(state.model) & tensors.keys() if is_other_first else ()
        self._buffers = {name: tensors[name].clone() for name in names}
        at = os.fstat(self._slots.fd)
        told = gather_objects((os.getpid(), self._slots.fd, at.st_dev, at.st_ino))
        here = [rank for rank in self._holders if dist.hosts[rank] == dist.hosts[dist.rank]]
        self._fds = {rank: fd for rank in here if (fd := _opened(*told[rank])) is not None}
        for rank, missing in enumerate(gather_objects(sorted(set(self._holders) - self._fds.keys()))):
            if missing:
                raise UserError(
                    f"checkpoint.mirror_every={every}, but {dist.describe(rank)} cannot read the memory of "
                    f"{dist.describe(missing[0])}, which holds a part of the same copy of the model: all of "
                    "them must be on one host, in one container; set strategy.shard_group=host, or "
                    "checkpoint.mirror_every=0"
                )

    def _holders_here(self, groups: list[list[int]]) -> list[int]:
        """The group whose copies this host keeps; this rank's own if none is on one host."""
        hosts, rank = self._dist.hosts, self._dist.rank
        here = (group for group in groups if all(hosts[each] == hosts[rank] for each in group))
        return next(here, None) or next(group for group in groups if rank in group)

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", {}).values():
            os.close(fd)

    def keep(self, data_state: Mapping[str, Any]) -> None:
        """Copy the state after one of the steps to copy. ``data_state`` is where this rank's data stands.

        Raises:
            UserError: the state cannot be saved, or this host has no memory left for it.
        """
        step, rank = self._state.progress.step, self._dist.rank
        if step % self._every or rank not in self._holders:
            return
        tensors, plain = take_apart(self._state.state_dict())
        everyones = [data_state if each == rank else {} for each in range(self._dist.world_size)]
        of_data, data_states = take_apart({DATA_STATES: everyones})
        tensors |= of_data
        here = {name: to_local(tensor) for name, tensor in tensors.items()}
        files = files_of(here, self._planned(tensors, of_data), rank, lambda name: (here[name],))
        facts = {
            "state": plain if rank == self._holders[0] else {},
            "data": data_states[DATA_STATES][rank],
            "own_buffers": not all(same_bits(tensors[name], first) for name, first in self._buffers.items()),
        }
        text = f'{json.dumps(facts)[:-1]}, "index": {self._index}}}'
        self._slots.write(step // self._every % 2, step, files, text)

    def _planned(self, tensors: Mapping[str, Tensor], of_data: Mapping[str, Tensor]) -> Plan:
        """Which rank keeps what; made again only where the names or shapes are other ones."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if self._plan is None or layout != self._layout:
            rank, world_size = self._dist.rank, self._dist.world_size
            self._plan = plan_of_shards(tensors, of_data, rank, self._holders, world_size)
            entries = self._plan.index(tensors)
            if rank != self._holders[0]:
                entries = {name: entries[name] for name in of_data}
            self._layout, self._index = layout, json.dumps(index_to_json(entries))
        return self._plan

    def newest(self) -> dict[int, Copy]:
        """The copies of the last step that all ranks have, by rank; also of those that are dead.

        Raises:
            UserError: there is none.
        """
        found = {rank: copies_in(fd) for rank, fd in self._fds.items()}
        steps = set.intersection(*(set(copies) for copies in found.values()))
        if not steps:
            lacking = [rank for rank, copies in found.items() if not copies]
            raise UserError(
                f"rank {lacking[0]} has no whole copy of its shard"
                if lacking
                else "the ranks' copies are of different steps"
            )
        newest = {rank: copies[max(steps)] for rank, copies in found.items()}
        if any(copy.facts["own_buffers"] for copy in newest.values()):
            raise UserError(OWN_BUFFERS)
        return newest


def _opened(pid: int, fd: int, device: int, inode: int) -> int | None:
    """The memory of another process, if that is of this host and container."""
    with contextlib.suppress(OSError):
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        at = os.fstat(opened)
        if (at.st_dev, at.st_ino) == (device, inode):
            return opened
        os.close(opened)
    return None


def contents_of(copies: Mapping[int, Copy], facts: Mapping[str, Any], expected: Expected) -> Contents:
    """The checkpoint of which ``copies`` are the parts, by rank; ``facts`` are those of all steps.

    Raises:
        UserError: a part of a tensor is in none of the copies, or in two.
    """
    index = {name: entry for copy in copies.values() for name, entry in copy.facts["index"].items()}
    index_from_json(Fields("the copies' index", index))
    world_size = facts["world_size"]
    return CopiedContents(
        step=next(copy.step for copy in copies.values()),
        format="sharded",
        plan=Plan(world_size, False, {}, {}),
        tensors={},
        facts={
            **facts,
            "state": next(copy.facts["state"] for copy in copies.values() if copy.facts["state"]),
            DATA_STATES: [copies[rank].facts["data"] if rank in copies else {} for rank in range(world_size)],
            "tensors": index,
        },
        metrics={},  # an evaluation is made again on resume: it may have changed the schedule since
        copies=copies,
        expected=expected,
    )


@dataclass(frozen=True)
class CopiedContents(Contents):
    """Contents whose files are ready, as ``copies`` by rank."""

    copies: Mapping[int, Copy]
    expected: Expected

    def write_tensors(self, directory: Path, agreement: Agreement) -> dict[str, FileDigest]:
        """Write all files; return the digests.

        Raises:
            UserError: a number is NaN or Inf and was not at the start; or a rank went on meanwhile.
            OSError: of the disk.
        """
        digests = {}
        for rank, copy in self.copies.items():
            for name, data in copy.files.items():
                with HashingFile(directory / name) as file:
                    file.write(data)
                digests[name] = file.digest
                with PlainFile(directory / name) as written:
                    tensors = {name_of(key, name): tensor for key, tensor in tensors_in(written).items()}
                    if bad := sorted(self.expected.new_in(tensors)):
                        raise UserError(f"{first_five(bad)} is not finite")
            if not copy.is_there:
                raise UserError(f"rank {rank} went on while its copy was written")
        return digests
