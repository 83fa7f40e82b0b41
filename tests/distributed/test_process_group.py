"""Detection of communication errors, which another rank may have caused."""

import pytest
import torch.distributed as dist

from trainer.distributed.process_group import _is_communication_error

OF_OTHERS = (
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    RuntimeError("NCCLException: remote process exited or there was a network error"),
    RuntimeError("NCCL operation timed out"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690"),
)


@pytest.mark.parametrize("error", OF_OTHERS, ids=str)
def test_communication_errors_are_detected_also_as_a_cause(error: RuntimeError) -> None:
    wrapped = ValueError("the loss failed")
    wrapped.__cause__ = error
    assert _is_communication_error(error) and _is_communication_error(wrapped)


def test_other_errors_are_not_communication_errors() -> None:
    assert not _is_communication_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
