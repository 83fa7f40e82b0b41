"""A save while training goes on: a copy of the state, and a thread that writes it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


def host_stager(device: torch.device) -> Callable[[dict[str, Tensor]], Future[dict[str, Tensor]]]:
    """A function that copies tensors to host memory, pinned under CUDA, which is reused by the next copy.

    It returns a Future of the copies at once, and copies in a separate thread, under CUDA on a separate
    stream.
    """
    # Only asynchronous saves need it, and it takes 2 % of the processor time of a start.
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    is_cuda = device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda,
            use_shared_memory=False,
            use_async_staging=is_cuda,  # for a CPU it would open a context on GPU 0, if there is one
            use_non_blocking_copy=is_cuda,
        )
    )
    stage: Any = stager.stage  # of a Future or, without a thread of its own, of the copy
    return stage if is_cuda else partial(ThreadPoolExecutor(1, "staging").submit, stage)


class Saving:
    """A save that was begun: of what, by which `copy`, and by which `write`; without these it is done.

    The thread works on ``device``: by default it starts with GPU 0, and its first CUDA call would take some
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
        """Wait until the state is copied; called before it changes. Of a copy that failed, `done` tells."""
        if self._copy is not None:
            wait([self._copy])
            self._copy = None

    def done(self) -> None:
        """Wait until all is written.

        Raises:
            UserError, Fault: it could not be; on every rank alike, and once.
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
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            write()
        except BaseException as error:
            self._error = error
