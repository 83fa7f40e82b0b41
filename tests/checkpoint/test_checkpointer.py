"""Save and restore among real ranks: the same rank count, another one, another layout, either format."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as torch_dist

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.open_checkpoint import verified
from trainer.errors import Fault, UserError
from trainer.optim.train_state import TrainState


def _save(
    run_dir: Path, steps: int, format: str, sharded: bool, more: int = 0, **options: Any
) -> dict[str, Any]:
    """Train, save, train on; returns the state as saved, and the state at the end."""
    state = tiny.train_state(sharded, **options)
    checkpointer = tiny.checkpointer(run_dir, format=format, state=state)
    tiny.train(state, steps)
    checkpointer.save(state, {"eval/loss": 1.0})
    saved = tiny.everything(state)
    tiny.train(state, more)
    checkpointer.saving.done()
    return {"saved": saved, "end": tiny.everything(state)}


def _resume(
    run_dir: Path, resume: str, format: str, sharded: bool, more: int = 0, **options: Any
) -> dict[str, Any]:
    state = tiny.train_state(sharded, **{"seed": 99, **options})
    checkpointer = tiny.checkpointer(run_dir, format=format)
    assert tiny.restore(checkpointer, state, resume)
    restored = tiny.everything(state)
    tiny.train(state, more)
    return {"saved": restored, "end": tiny.everything(state)}


@pytest.mark.slow
@pytest.mark.parametrize(("format", "sharded", "world"), [("full", False, 1), ("sharded", True, 2)])
def test_goes_on_as_if_never_stopped(tmp_path: Path, format: str, sharded: bool, world: int) -> None:
    """Step 5 lies within the second epoch; at step 9 all numbers are the same."""
    original = run_ranks(_save, world, tmp_path, 5, format, sharded, more=4)
    resumed = run_ranks(_resume, world, tmp_path, "auto", format, sharded, more=4)
    for rank in range(world):
        tiny.assert_same(original[rank]["saved"], resumed[rank]["saved"])
        tiny.assert_same(original[rank]["end"], resumed[rank]["end"])


def _saves_alone(run_dir: Path) -> list[tuple[bool, int]]:
    """Saves at a fault, of the step resumed from and of the next, where an older branch has saved both."""
    state = tiny.train_state()
    checkpointer = tiny.checkpointer(run_dir, keep_last=9, state=state)
    for _ in range(3):
        tiny.train(state, 1)
        checkpointer.save(state)
    assert not checkpointer.save_alone(state, {}, {}), "it is saved already"
    again, resumed = tiny.checkpointer(run_dir, keep_last=9), tiny.train_state(seed=9)
    assert tiny.restore(again, resumed, str(run_dir / "checkpoints" / "step_00000002"))
    found = []
    for steps in (0, 1, 0):
        tiny.train(resumed, steps)
        found.append((again.save_alone(resumed, {}, {}), resumed.progress.step))
    return found


def test_a_save_at_a_fault_takes_no_older_branch_for_its_own(tmp_path: Path) -> None:
    [found] = run_ranks(_saves_alone, 1, tmp_path)
    assert found == [(False, 2), (True, 3), (False, 3)]


PLACES = (
    lambda: {"a": torch.arange(3)},
    lambda: {"a": torch.arange(5)},  # of another size
    lambda: dict.fromkeys("ab", torch.arange(5)),  # saved once, under two names
    lambda: {"a": torch.arange(5), "b": torch.arange(5) + 2},
    lambda: {"a": torch.arange(5), "b": torch.arange(5) + 3},
)


def _save_other_layouts(run_dir: Path) -> None:
    """Rank 1's place changes its layout; that of rank 0 stays."""
    state = tiny.train_state(sharded=True)
    checkpointer = tiny.checkpointer(run_dir, format="sharded", state=state)
    for place in PLACES:
        tiny.train(state, 1)
        places = [{"a": torch.zeros(1)}, place()]
        checkpointer.save(state, data_state=places[tiny.facts().rank])
        found = verified((run_dir / "checkpoints" / "latest").resolve()).data_states()
        assert [{name: value.tolist() for name, value in place.items()} for place in found] == [
            {name: value.tolist() for name, value in place.items()} for place in places
        ]


@pytest.mark.slow
def test_a_save_is_planned_again_where_names_sizes_or_shared_memory_change(tmp_path: Path) -> None:
    run_ranks(_save_other_layouts, 2, tmp_path)


def _resume_others(run_dir: Path) -> None:
    _save(run_dir, 1, "full", False)
    with pytest.raises(UserError, match="the checkpoint is of another optimizer, without"):
        _resume(run_dir, "auto", "full", False, optimizer="momentum")
    with pytest.raises(UserError, match=r"first.weight \(\[7, 5\] float32 there, \[8, 5\] float32 here\)"):
        _resume(run_dir, "auto", "full", False, width=8)


def test_refuses_another_model_or_optimizer(tmp_path: Path) -> None:
    run_ranks(_resume_others, 1, tmp_path)


def _buffers_restored(run_dir: Path) -> list[float]:
    """The value of ``passes`` after a resume, in each layout and format."""
    found = []
    for sharded in (False, True):
        for format in ("full", "sharded"):
            root = run_dir / f"{format}{sharded}"
            state = tiny.train_state(sharded)
            tiny.train(state, 3)
            state.model.passes.is_initialized = True  # as Hugging Face marks its tensors; no part of a save
            tiny.checkpointer(root, format=format, state=state).save(state)
            fresh = tiny.train_state(sharded, seed=4)
            tiny.restore(tiny.checkpointer(root, format=format), fresh, "auto")
            found.append(fresh.model.passes.item())
    return found


@pytest.mark.slow
def test_a_buffer_that_is_not_persistent_is_saved_all_the_same(tmp_path: Path) -> None:
    assert run_ranks(_buffers_restored, 2, tmp_path) == [[3, 3, 3, 3]] * 2


ODD = (torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex64, torch.bool)


def _buffers_of_odd_dtypes(run_dir: Path) -> list[str]:
    """The buffers that were restored."""

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


def test_buffers_of_dtypes_that_torch_saves_in_another_way(tmp_path: Path) -> None:
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
    """How often each was called, of the first save and of another that has data states."""
    found = {}
    for format, sharded in itertools.product(("full", "sharded"), (False, True)):
        state, called = tiny.train_state(sharded), Counter[str]()
        checkpointer = tiny.checkpointer(run_dir / f"{format}{sharded}", format=format, state=state)
        with pytest.MonkeyPatch.context() as patch:
            for name in COLLECTIVES:
                real = getattr(torch_dist, name)

                patch.setattr(torch_dist, name, _counted(real, name, called))
            checkpointer.save(state)
            state.progress.step += 1
            checkpointer.save(state, {"eval/loss": 1.0}, {"at": torch.arange(tiny.facts().rank + 1)})
        found[format, sharded] = called
    return found


def test_a_save_is_three_collectives(tmp_path: Path) -> None:
    """Reports to rank 0 and its answer, before and after the write, which sends shards if rank 0 writes all."""
    for rank, found in enumerate(run_ranks(_collectives_of_a_save, 2, tmp_path)):
        for (format, sharded), called in found.items():
            shards = called.pop("send" if rank else "recv", 0)
            assert called == {"gather_object": 2 * 2, "broadcast_object_list": 2 * 2}, (format, sharded)
            assert bool(shards) == (format == "full" and sharded)


def _fail_to_copy(run_dir: Path, format: str) -> list[str]:
    """The failures of a copy in the background, and of one that cannot begin, on rank 1 alone."""
    state, messages = tiny.train_state(sharded=True), []
    checkpointer = tiny.checkpointer(run_dir, format=format, async_=True, state=state)
    checkpointer.save(state).done()
    stage, lost = checkpointer._stage, MemoryError("no host memory")
    failed: Future[dict[str, torch.Tensor]] = Future()
    failed.set_exception(lost)
    for failing in (Mock(return_value=failed), Mock(side_effect=lost)):
        state.progress.step += 1
        checkpointer._stage = failing if tiny.facts().rank == 1 else stage
        saving = checkpointer.save(state)
        saving.copied()
        with pytest.raises(Fault) as fault:
            saving.done()
        messages.append(str(fault.value))
    checkpointer._stage = stage
    checkpointer.save(state).done()
    assert verified(run_dir / "checkpoints" / "step_00000002").progress.step == 2
    return messages


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_copy_that_fails_on_one_rank_is_a_fault_of_all(tmp_path: Path, format: str) -> None:
    first, second = run_ranks(_fail_to_copy, 2, tmp_path, format)
    assert first == second
    for step, message in enumerate(first, start=1):
        assert (
            message
            == f"the checkpoint of step {step} could not be saved: rank 1: MemoryError: no host memory"
        )


class _LateStager:
    """Copies when asked, since a large model's copy comes late."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def stage(self, tensors: dict[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        def copy() -> dict[str, torch.Tensor]:
            assert self.go.wait(100)
            return {name: tensor.clone() for name, tensor in tensors.items()}

        return ThreadPoolExecutor(1).submit(copy)


def _save_while_training(run_dir: Path, wait: bool) -> bool:
    state = tiny.train_state()
    tiny.train(state, 2)
    saved = tiny.everything(state)
    checkpointer = tiny.checkpointer(run_dir, async_=True, state=state)
    stager = _LateStager()
    checkpointer._stage = stager.stage
    checkpointer.save(state)

    def before_update() -> None:
        if wait:
            stager.go.set()
            checkpointer.saving.copied()

    tiny.train(state, 1, before_update=before_update)
    stager.go.set()
    checkpointer.saving.done()
    fresh = tiny.train_state(seed=4)
    tiny.restore(tiny.checkpointer(run_dir), fresh, "auto")
    restored = tiny.everything(fresh)["tensors"]
    return all(tensor.equal(restored[name]) for name, tensor in saved["tensors"].items())


@pytest.mark.slow
def test_an_async_save_holds_the_update_back_until_all_is_copied(tmp_path: Path) -> None:
    """Batch norm's buffers change even before the update."""
    assert run_ranks(_save_while_training, 1, tmp_path / "waited", True) == [True]
    assert run_ranks(_save_while_training, 1, tmp_path / "not", False) == [False]


def _save_beside_an_idle_gpu(run_dir: Path) -> list[str]:
    """The calls to the accelerator of a machine that seems to have one."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch, "Stream", lambda *args, **kwargs: asked.append("a stream"))
        for async_ in (False, True):
            state = tiny.train_state()
            checkpointer = tiny.checkpointer(run_dir / str(async_), async_=async_, state=state)
            checkpointer.save(state)
            checkpointer.saving.done()
            assert tiny.restore(tiny.checkpointer(run_dir / str(async_)), tiny.train_state(seed=4), "auto")
    return asked


def test_a_save_on_cpus_touches_no_gpu(tmp_path: Path) -> None:
    """A stream would be GPU 0's, and with it some hundred MB there for every rank."""
    assert run_ranks(_save_beside_an_idle_gpu, 1, tmp_path) == [[]]


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
    tiny.train(on_gpu, 1, before_update=checkpointer.saving.copied)
    checkpointer.saving.done()
    on_cpu = tiny.train_state(seed=3)
    assert tiny.restore(tiny.checkpointer(run_dir / "gpu"), on_cpu, "auto")
    tiny.checkpointer(run_dir / "cpu", format=format, state=on_cpu).save(on_cpu)
    back = tiny.train_state(seed=4, device=device)
    assert tiny.restore(tiny.checkpointer(run_dir / "cpu", device), back, "auto")
    tiny.assert_same(tiny.everything(back), tiny.everything(on_cpu))
    tiny.train(back, 1)
    tiny.assert_same(tiny.everything(back), tiny.everything(on_gpu))
