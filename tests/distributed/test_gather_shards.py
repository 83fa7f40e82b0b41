"""Gathering of a sharded tensor on rank 0 for the final hash. Checkpoints need no communication."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.model.trainable_parameters import TrainableParameters
from trainer.report.run_hash import parameters_sha256
from trainer.state.train_state import Progress, TrainState
from trainer.tensors.local_shard import own_rows

WIDTH, DEPTH = 1024, 16  # 64 MB of parameters


def _pieces_of_every_layout() -> dict[str, list[Tensor]]:
    flat = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    uneven, few, half = torch.arange(21.0).view(7, 3), torch.arange(2), torch.ones(5, dtype=torch.bfloat16)
    tensors = {
        "whole": uneven.t(),
        "uneven": distribute_tensor(uneven, flat, [Shard(0)]),
        "fewer rows than ranks": distribute_tensor(few, flat, [Shard(0)]),
        "bf16": distribute_tensor(half, flat, [Shard(0)]),
        "hybrid": distribute_tensor(uneven, hybrid, [Replicate(), Shard(0)]),
        "copied": distribute_tensor(uneven, flat, [Replicate()]),
    }
    wholes = {"bf16": half, "fewer rows than ranks": few}
    for name, tensor in tensors.items():  # loading, which needs no communication
        if isinstance(tensor, DTensor):
            assert wholes.get(name, uneven)[slice(*own_rows(tensor))].equal(tensor.to_local()), name
    return {name: list(gather_shards_to_rank0(tensor)) for name, tensor in tensors.items()}


def _memory_of_a_save(run_dir: Path) -> tuple[float, float]:
    """Return the size of a whole state, and the additional memory for a checkpoint and a hash, in MB."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    mesh = init_device_mesh("cpu", (4,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    trained = TrainableParameters(model)
    optimizer = torch.optim.AdamW(trained.own.values())
    for number, shard in enumerate(trained.own.values()):
        shard.data.fill_(number + 0.25 * dist.get_rank())
        shard.grad = torch.zeros_like(shard)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = TrainState(trained, optimizer, schedule, torch.amp.GradScaler(enabled=False), Progress())
    checkpointer = tiny.checkpointer(run_dir, state=state)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpointer.save(state)
    parameters_sha256(model)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 3 * DEPTH * WIDTH**2 * 4 / 1e6, (after - before) / 1e3


def _all(run_dir: Path) -> dict[str, Any]:
    state = tiny.train_state(sharded=True)
    return {
        "memory": _memory_of_a_save(run_dir),
        "pieces": _pieces_of_every_layout(),
        "hashes": [parameters_sha256(state.model), parameters_sha256(tiny.train_state().model)],
    }


@pytest.mark.slow
def test_no_rank_holds_what_is_sharded(tmp_path: Path) -> None:
    first, *others = run_ranks(_all, 4, tmp_path)
    whole_mb, more_mb = first["memory"]
    assert more_mb < whole_mb / 2, f"{more_mb} MB for a state of {whole_mb}"
    weights = OpenCheckpoint.open(tmp_path / "checkpoints" / "step_00000000").read("model.")
    for number in range(DEPTH):
        rows = weights[f"{number}.weight"][:: WIDTH // 4, 0]
        assert rows.sub(number).div(0.25).round().tolist() == [0, 1, 2, 3]

    expected = {"few": [0, 1], "uneven": torch.arange(21.0).view(7, 3)}
    got = first["pieces"]
    assert [len(piece) for piece in got["uneven"]] == [2, 2, 2, 1]
    assert [len(piece) for piece in got["hybrid"]] == [4, 3]
    for name in ("uneven", "hybrid", "copied"):
        assert torch.cat(got[name]).equal(expected["uneven"])
    assert torch.cat(got["fewer rows than ranks"]).tolist() == expected["few"]
    assert torch.cat(got["bf16"]).equal(torch.ones(5, dtype=torch.bfloat16))
    assert got["whole"][0].equal(expected["uneven"].t())
    assert not any(pieces for rank in others for pieces in rank["pieces"].values())

    assert first["hashes"][0] == first["hashes"][1]
