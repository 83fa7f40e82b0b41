"""A fully_shard model with schedules of ours: equal to torch's own, with figures; who is not in step is named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from trainer.comm.execution.blame import CommError
from trainer.comm.shards import ShardComm, attach
from trainer.comm.timeline.report import table


class Model(nn.Sequential):
    """Calls its first unit twice, so that its gradients come in two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self[0](x).tanh())


def sharded(
    hosts: list[int], algorithm: str | None, timeout_s: float = 60.0
) -> tuple[nn.Sequential, ShardComm | None]:
    """Two units that look alike, and a root with what is left."""
    torch.manual_seed(0)
    model = Model(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 3))
    mesh = init_device_mesh("cpu", (len(hosts),), mesh_dim_names=("shard",))
    for unit in (model[0], model[1], model):
        fully_shard(unit, mesh=mesh)
    if algorithm is None:
        return model, None
    return model, attach(
        model, algorithm, group=mesh.get_group(), hosts=hosts, device=torch.device("cpu"), timeout_s=timeout_s
    )


def compared(hosts: list[int], algorithm: str) -> dict[str, Any]:
    """Gradients of both, of two passes added up and of one anew; and what the timeline has seen."""
    found: list[list[torch.Tensor]] = []
    for model, comm in (sharded(hosts, None), sharded(hosts, algorithm)):
        for step in range(3):
            torch.manual_seed(100 * step + dist.get_rank())
            with comm.one_pass() if comm is not None else nullcontext():
                model(torch.randn(4, 30)).square().mean().backward()
            if step != 0:
                found.append([p.grad.to_local().clone() for p in model.parameters()])  # type: ignore[union-attr]
                model.zero_grad()
    assert comm is not None
    model(torch.randn(4, 30))  # not in a pass: no figures of it
    error = max(
        float((a - b).abs().max())
        for own, theirs in zip(found[:2], found[2:], strict=True)
        for a, b in zip(own, theirs, strict=True)
    )
    magnitude = max(float(gradient.abs().max()) for gradient in found[0])
    figures, timeline = comm.timeline.metrics(), comm.timeline
    comm.close()
    names = [f"{record.name}" for record in timeline.last_pass]
    about = {"error": error / magnitude, "figures": figures, "names": names, "table": table(timeline)}
    return about | {"typical": timeline.typical_pass()["buckets"]}


def test_gradients_are_those_of_torch_and_both_collectives_have_figures() -> None:
    for found in run_ranks(compared, 3, [0, 1, 0], "hierarchical"):
        assert found["error"] < 1e-6
        units = ("the root", "unit 0", "unit 1")
        assert found["names"][0] == "all-gather of the root"
        kinds = ("all-gather", "reduce-scatter")
        assert set(found["names"]) == {f"{kind} of {unit}" for kind in kinds for unit in units}
        figures = found["figures"]
        total, parts = figures["comm/total_ms"], ("all_gather", "reduce_scatter")
        assert total == pytest.approx(sum(figures[f"comm/{part}_ms"] for part in parts), rel=0.01)
        assert total == pytest.approx(figures["comm/hidden_ms"] + figures["comm/exposed_ms"])
        assert all(0 <= figures[f"comm/{part}_exposed_ms"] <= figures[f"comm/{part}_ms"] for part in parts)
        assert "of reduce-scatter: " in found["table"]
        assert len(found["typical"]) == len(found["names"])
        for bucket, name in zip(found["typical"], found["names"], strict=True):
            assert name.startswith(bucket["collective"]) and bucket["early_ms"] >= bucket["needed_ms"] >= 0
        assert found["typical"][-1]["needed_ms"] == 0 < found["typical"][0]["needed_ms"]


def out_of_step(hosts: list[int]) -> str:
    """Rank 1 leaves a unit out in its second pass, and goes on with one that looks alike."""
    model, comm = sharded(hosts, "ring", timeout_s=2.0)
    assert comm is not None
    try:
        for left_out in (False, dist.get_rank() == 1):
            with comm.one_pass():
                first = torch.randn(4, 30) if left_out else model[0](torch.randn(4, 30))
                model[1](first).sum().backward()
    except CommError as error:
        return f"{error.peer}: {error}"
    return "no error"


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_unit_that_one_rank_leaves_out_is_noticed_by_the_deadline(hosts: list[int]) -> None:
    first, second = run_ranks(out_of_step, 2, hosts)
    assert first.startswith("1: the all-gather of unit 0, ") and "stopped at rank 0" in first
    assert second.startswith("0: the all-gather of unit 1, ") and "stopped at rank 1" in second
