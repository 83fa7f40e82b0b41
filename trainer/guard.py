"""What all ranks agree on before each update: that the loss is finite, whether to stop, what data is left."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed import Dist
from trainer.errors import NonFiniteLossError


class StepGuard:
    """One all-reduce of three numbers per step, hidden behind the backward pass.

    `launch` goes out after the last forward pass of a step and `settle` comes back before its update, so
    that every rank leaves the loop at the same step. On CUDA the numbers travel on a stream of their own:
    the host then waits for the end of the forward pass while the backward pass keeps the device busy, and
    no kernel queue runs dry.
    """

    def __init__(self, dist_: Dist) -> None:
        self._dist = dist_
        # MAX over ranks of (rank + 1 if its loss is not finite else 0), its stop request, no data left.
        self._flags = torch.zeros(3, device=dist_.device)
        self._bad = torch.tensor(float(dist_.rank + 1), device=dist_.device)
        self._good = torch.tensor(0.0, device=dist_.device)
        self._work: dist.Work | None = None
        self._on_cuda = dist_.device.type == "cuda"
        if self._on_cuda:
            self._stream = torch.cuda.Stream(dist_.device)
            self._done = torch.cuda.Event()
            self._on_host = torch.zeros(3, pin_memory=True)

    def launch(self, loss: Tensor, stop_requested: bool, data_left: bool) -> None:
        """Send this rank's word; `loss` is a detached scalar on the rank's device."""
        if self._on_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._write(loss, stop_requested, data_left)
                if self._work is not None:
                    self._work.wait()  # makes this stream wait, not the host
                self._on_host.copy_(self._flags, non_blocking=True)
                self._done.record()
            loss.record_stream(self._stream)
        else:
            self._write(loss, stop_requested, data_left)

    def settle(self, step: int) -> tuple[bool, bool]:
        """Return whether any rank asked to stop, and whether all have data for another step of this epoch.

        Raises:
            NonFiniteLossError: on every rank alike, when the loss of any was NaN or Inf.
        """
        if self._on_cuda:
            self._done.synchronize()
            bad, stop, ended = self._on_host.tolist()
        else:
            if self._work is not None:
                self._work.wait()
            bad, stop, ended = self._flags.tolist()
        if bad:
            raise NonFiniteLossError(
                f"the loss of step {step} is NaN or Inf on {self._dist.place(int(bad) - 1)}; no rank applied "
                "that step. Lower optim.lr, set train.clip_grad_norm, or look at the data of that rank",
                ranks=(int(bad) - 1,),
            )
        return bool(stop), not ended

    def all_have(self, data_left: bool) -> bool:
        """Whether all ranks have data for the first step of an epoch (a collective)."""
        missing = torch.tensor(float(not data_left), device=self._dist.device)
        if self._dist.world_size > 1:
            dist.all_reduce(missing, dist.ReduceOp.MAX)
        return not missing.item()

    def _write(self, loss: Tensor, stop_requested: bool, data_left: bool) -> None:
        torch.where(torch.isfinite(loss), self._good, self._bad, out=self._flags[0])
        # fill_ takes the number along with the launch. By `flags[1] = number` torch before 2.15 copies it
        # from the host and waits, on a stream that waits for the forward pass: the queue runs dry.
        self._flags[1].fill_(stop_requested)
        self._flags[2].fill_(not data_left)
        if self._dist.world_size > 1:
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
