"""The replica check finds a single different bit at the next check, and names its rank and tensor."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.failure_parts import flip
from tests.ranks import run_ranks
from tests.runs import context_of
from trainer.context import Run
from trainer.errors import ReplicasDifferError
from trainer.tensors.bits import bit_hashes, words_of

QUICK = (
    "logger=jsonl",
    "data.dataset._target_=tests.user_parts.Stripes",
    "model._target_=tests.user_parts.Normed",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "train.global_batch_size=24",
    "train.max_steps=3",
    "train.eval_every_epochs=0",
    "optim=adamw",
)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def found(context: Run) -> dict[str, Any] | None:
    """Return the result of a check; uses a new step each time, because each step is checked only once."""
    context.state.progress.step += 1
    try:
        context.guards.replicas.check(context.state)
    except ReplicasDifferError as error:
        return {"ranks": error.ranks, "message": str(error), "status": error.exit_code}
    return None


def flips(overrides: tuple[str, ...], seed: int, count: int) -> dict[str, Any]:
    """Train, then flip `count` bits one at a time, each on a random rank; return the results."""
    from trainer.loop import fit

    with context_of(*QUICK, *overrides) as context:
        fit(context)
        seen: dict[str, Any] = {"trained": found(context), "flips": []}
        for buffer in context.state.model.buffers():
            buffer += context.ranks.rank
        seen["buffers"] = found(context)
        names = dict(context.state.replicated())
        draw = random.Random(seed)
        for _ in range(count):
            rank, name = draw.randrange(context.ranks.world_size), draw.choice(sorted(names))
            where = draw.randrange(local(names[name]).numel()), draw.randrange(32)
            if rank == context.ranks.rank:
                flip(local(names[name]), *where)
            seen["flips"].append((rank, name, found(context)))
            if rank == context.ranks.rank:
                flip(local(names[name]), *where)
        seen["mended"] = found(context)
    return seen


@pytest.mark.slow
def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    for rank in run_ranks(flips, 3, (f"run_dir={tmp_path}",), 1, 20, init=False):
        assert rank["trained"] is rank["buffers"] is rank["mended"] is None
        assert {name.partition(" of ")[0] for _, name, _ in rank["flips"]} >= {
            "exp_avg",
            "exp_avg_sq",
            "step",
        }
        for odd, name, report in rank["flips"]:
            assert report["ranks"] == (odd,)
            others = ", ".join(str(other) for other in range(3) if other != odd)
            assert f"rank {odd} (host 0) differs from ranks {others}, first in {name}." in report["message"]
            assert report["status"] == 1


@pytest.mark.slow
def test_without_a_majority_both_replicas_are_named(tmp_path: Path) -> None:
    hybrid = ("strategy=fsdp", "strategy.shard_group=2", f"run_dir={tmp_path}")
    for rank in run_ranks(flips, 4, hybrid, 2, 6, init=False):
        assert rank["trained"] is rank["mended"] is None
        for odd, name, report in rank["flips"]:
            assert report["ranks"] == ()
            first = odd % 2
            assert (
                f"rank {first + 2} (host 0) differs from rank {first} (host 0), first in {name};"
                in report["message"]
            )


def saves(run_dir: Path) -> dict[str, Any]:
    from trainer.loop import fit

    with context_of(*QUICK, f"run_dir={run_dir}", "checkpoint.every_steps=2") as context:
        step = context.state.optimizer.step

        def diverge(*args: Any) -> None:
            step(*args)
            if (
                context.ranks.rank == 1 and context.state.progress.step == 2
            ):  # the third update, after the first save
                flip(next(context.state.model.parameters()), 0, 3)

        context.state.optimizer.step = diverge  # type: ignore[method-assign]
        with pytest.raises(
            ReplicasDifferError, match=r"after step 3 \(they were equal at step 2\).*Possible causes"
        ):
            fit(context)
    return {"saved": sorted(path.name for path in (run_dir / "checkpoints").iterdir())}


def test_differing_replicas_are_not_saved(tmp_path: Path) -> None:
    assert run_ranks(saves, 2, tmp_path, init=False)[0]["saved"] == ["step_00000002"]


def hashes_of(*tensors: Tensor) -> list[int]:
    return list(bit_hashes((str(number), tensor) for number, tensor in enumerate(tensors)).values())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_the_hash_supports_any_dtype(dtype: torch.dtype) -> None:
    zeros, one = torch.zeros(2, 7, dtype=dtype), torch.zeros(2, 7, dtype=dtype)
    one.view(torch.uint8)[1, -1] = 1
    first, second, empty = hashes_of(zeros, one, zeros[:0])
    assert len({first, second}) == 2
    assert empty == 0


def test_the_hash_finds_what_a_sum_misses() -> None:
    values = torch.arange(1.0, 700_000)  # several chunks
    swapped, signs, moved = values.clone(), values.clone(), torch.cat([values[1 << 18 :], values[: 1 << 18]])
    swapped[[3, 4]] = swapped[[4, 3]]
    signs[[3, 400_000]] *= -1
    assert len(set(hashes_of(values, swapped, signs, moved))) == 4


def test_the_hash_follows_memory_and_copies_no_dense_tensor() -> None:
    images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).weight.detach()
    assert words_of(images).data_ptr() == images.data_ptr()
    contiguous = torch.empty(0)
    contiguous.set_(images.untyped_storage(), 0, (images.numel(),))  # type: ignore[call-overload]
    assert hashes_of(images) == hashes_of(contiguous)
