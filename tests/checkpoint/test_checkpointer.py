"""Save and restore on several ranks: with another number of ranks, another layout, and both formats."""

import errno
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as torch_dist

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.listing import SetAside
from trainer.checkpoint.open_checkpoint import verified
from trainer.errors import RetryableError, UserError
from trainer.state.train_state import TrainState


def _saves_alone(run_dir: Path) -> list[tuple[bool, int]]:
    """Save on failure at the step resumed from and at the next one, which an older branch has saved too."""
    state = tiny.train_state()
    checkpointer = tiny.checkpointer(run_dir, keep_last=9, state=state)
    for _ in range(3):
        tiny.train(state, 1)
        checkpointer.save(state)
    assert not checkpointer.save_alone(state, {}, {}, lambda: None), "it is saved already"
    again, resumed = tiny.checkpointer(run_dir, keep_last=9), tiny.train_state(seed=9)
    assert tiny.restore(again, resumed, str(run_dir / "checkpoints" / "step_00000002"))
    found = []
    for steps in (0, 1, 0):
        tiny.train(resumed, steps)
        found.append((again.save_alone(resumed, {}, {}, lambda: None), resumed.progress.step))
    return found


def test_save_on_failure_ignores_checkpoints_of_older_branches(tmp_path: Path) -> None:
    [found] = run_ranks(_saves_alone, 1, tmp_path)
    assert found == [(False, 2), (True, 3), (False, 3)]


def _verified_steps(run_dir: Path) -> list[int]:
    """Return the verified step after a resume from another disk: in the same run, and in a new run."""
    state = tiny.train_state()
    saver = tiny.checkpointer(run_dir / "first", state=state)
    state.progress.step, saver.verified_step = 3, lambda: 2
    saver.save(state).wait()
    found = []
    for run_id in ("tiny", "new"):
        resumed = tiny.checkpointer(run_dir / run_id, run_id=run_id)
        tiny.restore(resumed, tiny.train_state(), f"{run_dir}/first/checkpoints/step_00000003")
        found.append(resumed.restored_verified)
    return found


def test_only_a_new_run_trusts_steps_after_the_verified_one(tmp_path: Path) -> None:
    assert run_ranks(_verified_steps, 1, tmp_path) == [[2, 3]]


def _set_aside_on_a_full_disk(run_dir: Path) -> None:
    saver = tiny.checkpointer(run_dir, state=tiny.train_state(), remote=f"file://{run_dir}/store")
    saver.finish_remote()  # takes ownership of the address
    errors: list[BaseException | None] = []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda failed: errors.append(failed.exc_value))
        patched.setattr(SetAside, "write", full)
        saver.set_aside(2, "a reason")
    assert errors == []


def test_a_full_disk_does_not_hide_the_wrong_result(tmp_path: Path) -> None:
    run_ranks(_set_aside_on_a_full_disk, 1, tmp_path)


def _resume_others(run_dir: Path) -> None:
    state = tiny.train_state()
    tiny.train(state, 1)
    tiny.checkpointer(run_dir, state=state).save(state)
    with_maxima = tiny.state_of(tiny.Net())
    with_maxima.optimizer = torch.optim.AdamW(with_maxima.trainable.own.values(), amsgrad=True)
    for other, words in (
        (
            tiny.train_state(optimizer="momentum"),
            "the checkpoint is from a different optimizer, which has no",
        ),
        (tiny.train_state(width=8), r"first.weight \(\[7, 5\] float32 saved, \[8, 5\] float32 here\)"),
        (with_maxima, "the checkpoint is from a different optimizer, which has no amsgrad; set optim"),
    ):
        with pytest.raises(UserError, match=words):
            tiny.restore(tiny.checkpointer(run_dir), other, "auto")


def test_refuses_another_model_or_optimizer(tmp_path: Path) -> None:
    run_ranks(_resume_others, 1, tmp_path)


ODD = (torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex64, torch.bool)


def _buffers_of_odd_dtypes(run_dir: Path) -> list[str]:
    """Return the restored buffers."""

    def state() -> TrainState:
        found = tiny.train_state()
        for dtype in ODD:
            found.model.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(3).to(dtype))
        return found

    saved, fresh = state(), state()
    for dtype in ODD:
        saved.model.get_buffer(str(dtype).removeprefix("torch.")).copy_(torch.tensor([1.0, 0.0, 2.0]))
    tiny.train(saved, 1)
    tiny.checkpointer(run_dir, state=saved).save(saved)
    assert tiny.restore(tiny.checkpointer(run_dir), fresh, "auto")
    mine, theirs = dict(saved.model.named_buffers()), dict(fresh.model.named_buffers())
    return [name for name in mine if torch.equal(mine[name].float(), theirs[name].float())]


def test_buffers_of_dtypes_that_safetensors_does_not_support(tmp_path: Path) -> None:
    [restored] = run_ranks(_buffers_of_odd_dtypes, 1, tmp_path)
    assert {str(dtype).removeprefix("torch.") for dtype in ODD} <= set(restored)


COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "scatter", "send", "recv"),
)


def _counted(real: Callable[..., Any], name: str, called: Counter[str]) -> Callable[..., Any]:
    def calling(*args: Any, **options: Any) -> Any:
        called[name] += 1
        return real(*args, **options)

    return calling


def _collectives_of_a_save(run_dir: Path) -> dict[tuple[str, bool], Counter[str]]:
    """Return the number of calls of each collective in a first save, and in one with data states."""
    found = {}
    for format, sharded in (("full", False), ("sharded", False), ("sharded", True)):
        state, called = tiny.train_state(sharded), Counter[str]()
        checkpointer = tiny.checkpointer(run_dir / f"{format}{sharded}", format=format, state=state)
        with pytest.MonkeyPatch.context() as patch:
            for name in COLLECTIVES:
                real = getattr(torch_dist, name)

                patch.setattr(torch_dist, name, _counted(real, name, called))
            checkpointer.save(state)
            state.progress.step += 1
            checkpointer.save(state, {"at": torch.arange(tiny.facts().rank + 1)})
        found[format, sharded] = called
    return found


def test_a_save_gathers_reports_and_broadcasts_decisions(tmp_path: Path) -> None:
    """Each rank reports to rank 0 and gets its answer, before and after the write.

    Tensors stay on their ranks.
    """
    for found in run_ranks(_collectives_of_a_save, 2, tmp_path):
        for (format, sharded), called in found.items():
            assert called == {"gather_object": 2 * 2, "broadcast_object_list": 2 * 2}, (format, sharded)


def _fail_to_copy(run_dir: Path, sharded: bool) -> list[str]:
    """Return the errors of a background copy that fails, and of one that cannot start, on rank 1 only."""
    state, messages = tiny.train_state(sharded), []
    checkpointer = tiny.checkpointer(run_dir, async_=True, state=state)
    checkpointer.save(state).wait()
    for failing in ("on", "event"):  # called in the background, and before
        state.progress.step += 1
        with pytest.MonkeyPatch.context() as patch:
            if tiny.facts().rank == 1:
                patch.setattr(f"trainer.accelerator.{failing}", Mock(side_effect=MemoryError("no memory")))
            saving = checkpointer.save(state)
            saving.wait_until_copied()
        with pytest.raises(RetryableError) as fault:
            saving.wait()
        messages.append(str(fault.value))
    checkpointer.save(state).wait()
    assert verified(run_dir / "checkpoints" / "step_00000002").progress.step == 2
    return messages


@pytest.mark.parametrize("sharded", [False, True])
def test_a_copy_that_fails_on_one_rank_fails_on_all(tmp_path: Path, sharded: bool) -> None:
    first, second = run_ranks(_fail_to_copy, 2, tmp_path, sharded)
    assert first == second
    for step, message in enumerate(first, start=1):
        assert message == f"failed to save the checkpoint of step {step}: rank 1: MemoryError: no memory"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize("async_", [False, True])
def test_from_a_gpu_to_the_cpu_and_back(tmp_path: Path, format: str, async_: bool) -> None:
    run_ranks(_gpu_cpu_gpu, 1, tmp_path, format, async_)


def _gpu_cpu_gpu(run_dir: Path, format: str, async_: bool) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    on_gpu = tiny.train_state(device=device)
    tiny.train(on_gpu, 2)
    checkpointer = tiny.checkpointer(run_dir / "gpu", device, format=format, async_=async_, state=on_gpu)
    checkpointer.save(on_gpu)
    tiny.train(on_gpu, 1, before_update=checkpointer.saving.wait_until_copied)
    checkpointer.saving.wait()
    on_cpu = tiny.train_state(seed=3)
    assert tiny.restore(tiny.checkpointer(run_dir / "gpu"), on_cpu, "auto")
    tiny.checkpointer(run_dir / "cpu", format=format, state=on_cpu).save(on_cpu)
    back = tiny.train_state(seed=4, device=device)
    assert tiny.restore(tiny.checkpointer(run_dir / "cpu", device), back, "auto")
    tiny.assert_same(tiny.everything(back), tiny.everything(on_cpu))
    tiny.train(back, 1)
    tiny.assert_same(tiny.everything(back), tiny.everything(on_gpu))
