"""Writing a checkpoint, perhaps while training goes on, from a copy: the files of tensors, each by one rank,
then state.json and the manifest."""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import accelerator
from trainer.checkpoint.layout import Plan, key_of
from trainer.checkpoint.manifest import FileDigest, write_text
from trainer.checkpoint.open_checkpoint import STATE
from trainer.checkpoint.safetensors_files import ToStore, write_file
from trainer.checkpoint.store import Store
from trainer.distributed.agreement import Agreement
from trainer.errors import RetryableError, UserError
from trainer.failures.heartbeat import at_disk
from trainer.tensors.local_shard import num_rows, to_local

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_PATIENCE_S = 1.0  # shorter waits are not logged


@dataclass(frozen=True)
class Contents:
    """What a checkpoint will hold.

    Attributes:
        tensors: returns those that this rank writes, or of which it writes a shard, by their names in the
            checkpoint; waits until they are copied, if they are.
        facts: all else, as STATE has it; on rank 0.
        branch: of the run, for the manifest.
    """

    step: int
    plan: Plan
    tensors: Callable[[], Mapping[str, Tensor]]
    facts: Mapping[str, Any]
    branch: str

    def write_tensors(self, directory: Path, rank: int) -> dict[str, FileDigest]:
        """Write this rank's files, hashed on the way and fsynced; return their digests by name.

        Raises:
            OSError: the disk failed.
        """
        files: dict[str, list[ToStore]] = {}
        for name, tensor in self.tensors().items():
            local = to_local(tensor)
            if num_rows(local.shape) or rank == self.plan.writers[name][0]:
                stored = ToStore(key_of(name), local, local.dtype)
                files.setdefault(self.plan.file_of(name, rank), []).append(stored)
        return {name: write_file(directory / name, stored) for name, stored in files.items()}


def write_checkpoint(
    store: Store,
    directory: Path,
    contents: Contents,
    agreement: Agreement,
    clears: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint, which appears in ``store`` whole or not at all (a collective).

    Args:
        directory: from ``store.new_directory``.
        clears: whether this rank deletes what a failure leaves: one on each host, since hosts may have no
            disk in common.
        check: called on rank 0 when all is written; raises if it must not appear.

    Raises:
        UserError, RetryableError: on every rank alike; what was there before is unchanged.
    """
    plan = contents.plan

    def write() -> dict[str, FileDigest]:
        digests = contents.write_tensors(directory, agreement.rank)
        if agreement.rank == 0:
            text = f'{json.dumps(contents.facts)[:-1]}, "tensors": {plan.index}}}'
            digests[STATE] = write_text(directory / STATE, text)
        return digests

    def commit(digests: list[dict[str, FileDigest]]) -> None:
        files = {name: digest for part in digests for name, digest in part.items()}
        check()
        store.commit(contents.step, plan.format, files, contents.branch)

    try:
        agreement.decide_on_rank0(write, commit)
    except (UserError, RetryableError):
        if clears:
            with at_disk():
                shutil.rmtree(directory, ignore_errors=True)
        raise


def host_stager(
    device: torch.device,
) -> Callable[[Mapping[str, Tensor], Collection[str]], Future[dict[str, Tensor]]]:
    """A function that copies tensors to memory of the host, pinned if that helps; the next copy reuses it.

    It returns a Future of the copies at once. A thread copies, on a stream beside the current one, when that
    has computed what is queued now. Only the tensors that the second argument names are copied before it
    returns, on their device: buffers above all, which the next forward pass changes.
    """
    stream, kept = accelerator.stream(device), dict[str, Tensor]()

    def copied(tensors: Mapping[str, Tensor], computed: Any) -> dict[str, Tensor]:
        accelerator.use(device)
        stream.wait_event(computed)
        with accelerator.on(stream):
            for name, tensor in tensors.items():
                own = kept.get(name)
                if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                    own = torch.empty_like(tensor, device=CPU, pin_memory=accelerator.can_pin(tensor.device))
                kept[name] = own.copy_(tensor.detach(), non_blocking=tensor.device == device)
        stream.synchronize()
        return {name: kept[name] for name in tensors}

    def stage(tensors: Mapping[str, Tensor], changing: Collection[str]) -> Future[dict[str, Tensor]]:
        copies: Future[dict[str, Tensor]] = Future()

        def copy(unchanged: Mapping[str, Tensor], computed: Any) -> None:
            try:
                copies.set_result(copied(unchanged, computed))
            except BaseException as error:
                copies.set_exception(error)

        try:
            unchanged = {n: value.clone() if n in changing else value for n, value in tensors.items()}
            computed = accelerator.event(device)
            computed.record(accelerator.current_stream(device))
            threading.Thread(target=copy, args=(unchanged, computed), name="staging", daemon=True).start()
        except Exception as error:  # told to all ranks by the write
            copies.set_exception(error)
        return copies

    return stage


class Saving:
    """The rest of a save: ``copy`` copies the state, a thread calls ``write``. Without them, nothing remains.

    ``what`` names it in the log.

    The thread works on ``device``: by default it starts with GPU 0, and its first call there would take some
    hundred MB there for every rank of a host. It is a daemon: when training fails, the process ends at once
    and leaves a temporary directory, which the next start removes.
    """

    def __init__(
        self,
        what: str = "",
        copy: Future[Any] | None = None,
        write: Callable[[], None] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._what, self._copy, self._device = what, copy, device
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
            self._thread.start()

    def wait_until_copied(self) -> None:
        """Wait until the state is copied; called before it changes. `wait` raises if the copy failed."""
        if self._copy is not None:
            wait([self._copy])
            self._copy = None

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            UserError, RetryableError: the save failed; on every rank alike, and only at the first call.
        """
        if self._thread is None:
            return
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            log.info("waiting for %s", self._what)
            self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            accelerator.use(self._device)
            write()
        except BaseException as error:
            self._error = error
