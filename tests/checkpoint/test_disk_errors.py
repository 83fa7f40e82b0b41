"""A disk that fails once during a save or resume raises a retryable error on every rank."""

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.open_checkpoint import verified
from trainer.errors import RetryableError

SAVE = ((1, os, "fsync"), (0, Path, "open"), (0, Path, "rename"))
RESUME = ((0, Path, "iterdir"), (1, io, "FileIO"), (1, os, "preadv"))


def _fail_once(patch: pytest.MonkeyPatch, where: Any, name: str, code: int) -> None:
    real, calls = getattr(where, name), list[None]()

    def called(*args: Any, **options: Any) -> Any:
        if not str(args[0]).startswith("/proc/self/fd"):  # a new group looks at its descriptors
            calls.append(None)
            if len(calls) == 1:
                raise OSError(code, os.strerror(code))
        return real(*args, **options)

    patch.setattr(where, name, called)


def _fail_everywhere(run_dir: Path, code: int) -> list[str]:
    state = tiny.train_state(sharded=True)
    checkpointer = tiny.checkpointer(run_dir, format="sharded", state=state)
    checkpointer.save(state).wait()
    messages = []
    for rank, where, name in (*SAVE, *RESUME):
        state.progress.step += 1
        with pytest.MonkeyPatch.context() as patch:
            if torch_dist.get_rank() == rank:
                _fail_once(patch, where, name, code)
            with pytest.raises(Exception) as raised:
                if (rank, where, name) in SAVE:
                    checkpointer.save(state)
                else:
                    tiny.checkpointer(run_dir).open("auto")
        assert type(raised.value) is RetryableError and raised.value.exit_code == 1, repr(raised.value)
        messages.append(str(raised.value))
        torch_dist.barrier()
        assert not list((run_dir / "checkpoints").glob(".*"))
        torch_dist.barrier()
        checkpointer.save(state).wait()  # of the same step: what failed is not held for saved
        step = state.progress.step
        assert verified(run_dir / "checkpoints" / f"step_{step:08d}").manifest.step == step
    found = tiny.checkpointer(run_dir).open("auto")
    assert found is not None and found.progress.step == state.progress.step
    return messages


@pytest.mark.parametrize("name", ["EIO", "ENOSPC"])
def test_a_disk_that_fails_once_is_a_retryable_error_on_all_ranks(tmp_path: Path, name: str) -> None:
    code = getattr(errno, name)
    first, second = run_ranks(_fail_everywhere, 2, tmp_path, code)
    assert first == second
    assert all(os.strerror(code) in message for message in first)
