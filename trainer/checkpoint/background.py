"""What a save during training needs: a copy of the state, and a thread that writes it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor


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


class InBackground:
    """Runs ``action`` in a thread that works on ``device``.

    By default a thread starts with GPU 0, and its first CUDA call would take some hundred MB there for every
    rank of a host.

    The thread is a daemon: when training fails, the process ends at once and leaves a temporary directory,
    which the next start removes. With an executor of the standard library, the failure would wait for the
    disk.
    """

    def __init__(self, action: Callable[[], None], device: torch.device) -> None:
        self._action, self._device = action, device
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when ``action`` has ended. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._action()
        except BaseException as error:
            self._error = error
