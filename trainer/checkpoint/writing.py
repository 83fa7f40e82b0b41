"""Write a checkpoint, optionally while training continues, from a copy.

Each file of tensors is written by one rank. Then rank 0 writes state.json and the manifest.
"""

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
_LOG_WAIT_S = 1.0  # shorter waits are not logged


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint that is being written.

    Attributes:
        tensors: waits for the copies of the tensors that this rank writes, and returns them by name.
        facts: the other contents of state.json; used on rank 0.
        branch: the branch of the run, for the manifest.
        verified: the last verified step, for the manifest.
    """

    step: int
    plan: Plan
    tensors: Callable[[], Mapping[str, Tensor]]
    facts: Mapping[str, Any]
    branch: str
    verified: int | None

    def write_tensors(self, directory: Path, rank: int) -> dict[str, FileDigest]:
        """Write and fsync this rank's files; return their digests by name. Raises OSError."""
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
    cleans_up: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint to ``store`` atomically (a collective).

    Args:
        cleans_up: whether this rank deletes partial files after a failure; true on one rank of each host.
        check: called on rank 0 when all files are written; raises if the checkpoint must not be published.

    Raises:
        UserError, RetryableError: on every rank, if writing fails. Existing checkpoints stay unchanged.
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
        store.commit(contents.step, plan.format, files, contents.branch, contents.verified)

    try:
        agreement.decide_on_rank0(write, commit)
    except (UserError, RetryableError):
        if cleans_up:
            with at_disk():
                shutil.rmtree(directory, ignore_errors=True)
        raise


def host_stager(
    device: torch.device,
) -> Callable[[Mapping[str, Tensor], Collection[str]], Future[dict[str, Tensor]]]:
    """Return a function that copies tensors to host memory, which it reuses and pins if possible.

    The function immediately returns a Future of the copies, which a thread makes on a separate stream, after
    the work that is queued on the current stream. Tensors that are named in the second argument, such as
    buffers that the next forward pass changes, are copied on their device before the function returns.
    """
    stream, memory = accelerator.stream(device), dict[str, Tensor]()

    def copied(tensors: Mapping[str, Tensor], computed: Any) -> dict[str, Tensor]:
        accelerator.use(device)
        stream.wait_event(computed)
        with accelerator.on(stream):
            for name, tensor in tensors.items():
                copy = memory.get(name)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = torch.empty_like(tensor, device=CPU, pin_memory=accelerator.can_pin(tensor.device))
                memory[name] = copy.copy_(tensor.detach(), non_blocking=tensor.device == device)
        stream.synchronize()
        return {name: memory[name] for name in tensors}

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
        except Exception as error:  # the write raises it on all ranks
            copies.set_exception(error)
        return copies

    return stage


class Saving:
    """A save in progress.

    It runs in a daemon thread, so that the process can end at once if training fails. The next start of the
    run then removes the temporary directory.

    Args:
        write: called in a thread; None if nothing remains to be done.
        device: the current device of the thread. By default, it would be GPU 0, where the first call of each
            rank allocates a few hundred MB.
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
        """Wait until the state is copied and may be changed. If the copy failed, `wait` raises the error."""
        if self._copy is not None:
            wait([self._copy])
            self._copy = None

    def wait(self) -> None:
        """Wait until the save is complete.

        Raises:
            UserError, RetryableError: on every rank, at the first call, if the save failed.
        """
        if self._thread is None:
            return
        self._thread.join(_LOG_WAIT_S)
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
