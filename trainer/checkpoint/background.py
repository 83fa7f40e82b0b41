"""A save while training goes on: a copy of the state, and a thread that writes it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from trainer import accelerator

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


def host_stager(device: torch.device) -> Callable[[dict[str, Tensor]], Future[dict[str, Tensor]]]:
    """A function that copies tensors to memory of the host, pinned if that helps; the next copy reuses it.

    It returns a Future of the copies at once, and copies in a thread, on a stream beside the current one,
    when that has computed what is queued now.
    """
    stream, kept = accelerator.stream(device), dict[str, Tensor]()

    def copy(tensors: dict[str, Tensor], computed: Any, copies: Future[dict[str, Tensor]]) -> None:
        try:
            copies.set_result(copied(tensors, computed))
        except BaseException as error:
            copies.set_exception(error)

    def copied(tensors: dict[str, Tensor], computed: Any) -> dict[str, Tensor]:
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

    def stage(tensors: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        computed = accelerator.event(device)
        computed.record(accelerator.current_stream(device))
        copies: Future[dict[str, Tensor]] = Future()
        threading.Thread(target=copy, args=(tensors, computed, copies), name="staging", daemon=True).start()
        return copies

    return stage


class Saving:
    """A save of ``what``: ``copy`` copies the state, a thread calls ``write``. Without these it is done.

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

    def copied(self) -> None:
        """Wait until the state is copied; called before it changes. `done` raises if the copy failed."""
        if self._copy is not None:
            wait([self._copy])
            self._copy = None

    def done(self) -> None:
        """Wait until all is written.

        Raises:
            UserError, Fault: the save failed; on every rank alike, and only at the first call.
        """
        if self._thread is None:
            return
        if self._thread.is_alive():
            log.info("waiting for %s, which is still being written", self._what)
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
