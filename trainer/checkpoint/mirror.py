"""Copies in memory of what each rank would write of a sharded checkpoint, and a save from them at a fault."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.copies import Copy, CopyWriter, copies_in
from trainer.checkpoint.exchange import CopyExchange
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
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.safetensors_files import tensors_in
from trainer.checkpoint.state_file import DATA_STATES
from trainer.checkpoint.tree import take_apart
from trainer.checkpoint.writing import Contents, SaveLayout, files_of
from trainer.distributed.agreement import Agreement, gather_objects
from trainer.distributed.process_group import Dist, gloo_group
from trainer.errors import UserError
from trainer.files.untrusted import Fields, first_five
from trainer.local_shard import same_bits, to_local
from trainer.optim.plain_names import buffer_names
from trainer.optim.train_state import TrainState

OWN_BUFFERS = "the model's running statistics, or other buffers, are those of rank 0"


class Mirror:
    """Keeps copies of this rank's part of the state, and opens those of the ranks that hold it together.

    Each host keeps copies of all shards of one model. Where several groups of ranks each hold a model, it is
    that of the first group that is whole on the host, or else of the first that is partly there. A group on
    two hosts exchanges its copies. Creating this and each exchange are collectives.

    Args:
        every: of how many steps one is copied.
        own_buffers: whether ranks have different buffers, of which those of rank 0 are the model's.
        timeout_s: how long a rank of the other host may keep this one waiting.

    Raises:
        UserError: a group is on more hosts, or a host's ranks are in several containers; on every rank.
    """

    def __init__(
        self, dist: Dist, state: TrainState, every: int, own_buffers: bool, timeout_s: float
    ) -> None:
        self._dist, self._state, self._every = dist, state, every
        self._copies = CopyWriter(dist.device)
        self._plan: Plan | None = None
        self._layout: list[Any] = []
        self._index = ""
        tensors, _ = take_apart(state.state_dict())
        groups = copies_of_shards(tensors)
        kept_on = {host: _kept_on(host, groups, dist.hosts) for host in dict.fromkeys(dist.hosts)}
        self._holders = next(group for group in groups if dist.rank in group)
        self._takes_part = self._holders in kept_on.values()
        is_other_first = own_buffers and dist.rank == self._holders[0] != 0
        names = buffer_names(state.model) & tensors.keys() if is_other_first else ()
        self._buffers = {name: tensors[name].clone() for name in names}
        kept = [group for group in groups if group in kept_on.values()]
        self._exchange = self._exchange_of(kept, timeout_s)
        self._fds = self._memories(kept_on[dist.hosts[dist.rank]])

    def _exchange_of(self, kept: list[list[int]], timeout_s: float) -> CopyExchange | None:
        """This rank's exchange, if its group, one of `kept`, is on two hosts (a collective)."""
        dist, found = self._dist, None
        for holders in kept:
            num_hosts = len({dist.hosts[rank] for rank in holders})
            if num_hosts > 2:
                raise UserError(
                    f"checkpoint.mirror_every={self._every}, but a copy of the model is sharded over "
                    f"{num_hosts} hosts, and shards are copied between two at most; set strategy.shard_group "
                    "to host, or to as many ranks as one or two hosts have; or checkpoint.mirror_every=0"
                )
            if num_hosts == 2:
                group = gloo_group(timeout_s, holders)
                if dist.rank in holders:
                    found = CopyExchange(dist, self._copies.memory, holders, group, timeout_s)
        return found

    def _memories(self, holders: list[int]) -> dict[int, int]:
        """By rank of `holders`, a descriptor of the memory on this host with its copies (a collective)."""
        received = self._exchange.received if self._exchange is not None else {}
        memories = {self._dist.rank: self._copies.memory, **received}
        places = {rank: (memory.fd, *_identity(memory.fd)) for rank, memory in memories.items()}
        told = gather_objects((os.getpid(), places))
        own_host = self._dist.hosts[self._dist.rank]
        here = [each for each, host in zip(told, self._dist.hosts, strict=True) if host == own_host]
        wanted = {of: (pid, *at) for pid, kept in here for of, at in kept.items() if of in holders}
        fds = {of: fd for of, at in wanted.items() if (fd := _open_memory(*at)) is not None}
        for rank, missing in enumerate(gather_objects(sorted(set(holders) - fds.keys()))):
            if missing:
                raise UserError(
                    f"checkpoint.mirror_every={self._every}, but {self._dist.describe(rank)} cannot read the "
                    f"copies of {self._dist.describe(missing[0])} in the memory of its host: all ranks of a "
                    "host must be in one container; or set checkpoint.mirror_every=0"
                )
        return fds

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", {}).values():
            os.close(fd)

    def wait(self) -> None:
        """Called before each update: wait until the last copies are on both hosts, if the next replace some.

        Raises:
            PeerError: a rank is gone or silent.
            UserError: this host has no memory left for the copies of the other.
        """
        if self._exchange is not None and (self._state.progress.step + 1) % self._every == 0:
            self._exchange.wait()

    def close(self) -> None:
        """Called once, after a successful run."""
        if self._exchange is not None:
            self._exchange.close()

    def keep(self, data_state: Mapping[str, Any]) -> None:
        """Copy the state after one of the steps to copy. ``data_state`` is where this rank's data stands.

        Raises:
            UserError: the state cannot be saved, or this host has no memory left for it.
        """
        step, rank = self._state.progress.step, self._dist.rank
        if step % self._every or not self._takes_part:
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
        number = step // self._every % 2
        self._copies.write(number, step, files, text)
        if self._exchange is not None:
            self._exchange.begin(number, step)

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


def _kept_on(host: int, groups: list[list[int]], hosts: Sequence[int]) -> list[int]:
    """The group whose copies a host keeps: the first that is all there, else that has a rank there."""
    there = [[rank for rank in group if hosts[rank] == host] for group in groups]
    whole = (group for group, ranks in zip(groups, there, strict=True) if ranks == group)
    partly = (group for group, ranks in zip(groups, there, strict=True) if ranks)
    return next(whole, None) or next(partly)


def _identity(fd: int) -> tuple[int, int]:
    at = os.fstat(fd)
    return at.st_dev, at.st_ino


def _open_memory(pid: int, fd: int, device: int, inode: int) -> int | None:
    """Open the memory of another process; None if that is not of this host and container."""
    with contextlib.suppress(OSError):
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        if _identity(opened) == (device, inode):
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
        layout=SaveLayout("sharded", Plan(world_size, False, {}, {}), json.dumps(index)),
        tensors={},
        facts={
            **facts,
            "state": next(copy.facts["state"] for copy in copies.values() if copy.facts["state"]),
            DATA_STATES: [copies[rank].facts["data"] if rank in copies else {} for rank in range(world_size)],
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
