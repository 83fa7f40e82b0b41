"""A fully_shard model with this project's schedules: equal to torch's own, with metrics; lagging ranks are named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.ranks import run_ranks
from trainer.comm.fsdp_collectives import ShardComm, attach
from trainer.comm.timeline.summary import table
from trainer.comm.transport.blame import CommError


class Model(nn.Sequential):
    """Calls its first unit twice, so that its gradients come twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self[0](x).tanh())


def sharded(
    hosts: list[int],
    algorithm: str | None,
    timeout_s: float = 60.0,
    dtype: torch.dtype = torch.float32,
    policy: MixedPrecisionPolicy | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[nn.Sequential, ShardComm | None]:
    """Two equal units, and a root with the rest; each parameter's gradient is `grad_dtype`."""
    torch.manual_seed(0)
    model = Model(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 3)).to(dtype)
    if grad_dtype is not None:
        for parameter in model.parameters():
            parameter.grad_dtype = grad_dtype
    mesh = init_device_mesh("cpu", (len(hosts),), mesh_dim_names=("shard",))
    for unit in (model[0], model[1], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    if algorithm is None:
        return model, None
    return model, attach(
        model, algorithm, group=mesh.get_group(), hosts=hosts, device=torch.device("cpu"), timeout_s=timeout_s
    )


def compared(hosts: list[int], algorithm: str) -> dict[str, Any]:
    """Gradients of both, of two accumulated passes and of one more; and the timeline's records."""
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
    model(torch.randn(4, 30))  # not in a pass: no metrics of it
    error = max(
        float((a - b).abs().max())
        for own, theirs in zip(found[:2], found[2:], strict=True)
        for a, b in zip(own, theirs, strict=True)
    )
    magnitude = max(float(gradient.abs().max()) for gradient in found[0])
    metrics, timeline = comm.timeline.metrics(), comm.timeline
    comm.close()
    names = [f"{record.name}" for record in timeline.last_pass]
    about = {"error": error / magnitude, "metrics": metrics, "names": names, "table": table(timeline)}
    return about | {"typical": timeline.typical_pass()["buckets"]}


def test_gradients_are_those_of_torch_and_both_collectives_have_metrics() -> None:
    for found in run_ranks(compared, 3, [0, 1, 0], "hierarchical"):
        assert found["error"] < 1e-6
        units = ("the root", "unit 0", "unit 1")
        assert found["names"][0] == "all-gather of the root"
        kinds = ("all-gather", "reduce-scatter")
        assert set(found["names"]) == {f"{kind} of {unit}" for kind in kinds for unit in units}
        metrics = found["metrics"]
        total, parts = metrics["comm/total_ms"], ("all_gather", "reduce_scatter")
        assert total == pytest.approx(sum(metrics[f"comm/{part}_ms"] for part in parts), rel=0.01)
        assert total == pytest.approx(metrics["comm/hidden_ms"] + metrics["comm/exposed_ms"])
        assert all(0 <= metrics[f"comm/{part}_exposed_ms"] <= metrics[f"comm/{part}_ms"] for part in parts)
        assert "of reduce-scatter: " in found["table"]
        assert len(found["typical"]) == len(found["names"])
        for bucket, name in zip(found["typical"], found["names"], strict=True):
            assert name.startswith(bucket["collective"]) and bucket["early_ms"] >= bucket["needed_ms"] >= 0
        assert found["typical"][-1]["needed_ms"] == 0 < found["typical"][0]["needed_ms"]


FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [  # of parameters, of gathers, of reduces, of gradients; None: as the parameters
    *((dtype, None, None, None) for dtype in (FP64, FP32, BF16, FP16)),
    *((FP32, half, reduced, None) for half in (BF16, FP16) for reduced in (FP64, FP32, half)),
    (FP64, FP32, FP32, None),
    (BF16, None, FP32, None),
    (FP32, None, FP64, None),
    *((FP32, None, reduced, grads) for reduced in (None, FP32) for grads in (FP64, BF16)),
]


def errors(hosts: list[int]) -> dict[str, float]:
    """The largest difference to gradients by torch's own collectives, over the largest of these."""
    found: dict[str, float] = {}
    for dtype, gathered, reduced, grad_dtype in DTYPES:
        policy, gradients = MixedPrecisionPolicy(gathered, reduced), []
        for algorithm in (None, "ring"):
            model, comm = sharded(hosts, algorithm, dtype=dtype, policy=policy, grad_dtype=grad_dtype)
            with comm.one_pass() if comm is not None else nullcontext():
                torch.manual_seed(dist.get_rank())
                model(torch.randn(4, 30, dtype=dtype)).square().mean().backward()
            shards = [p.grad.to_local().flatten() for p in model.parameters()]  # type: ignore[union-attr]
            gradients.append(torch.cat(shards).double())
            if comm is not None:
                comm.close()
        torchs, own = gradients
        name = f"{dtype} gathered as {gathered}, reduced as {reduced}, gradients {grad_dtype}"
        found[name] = float((own - torchs).abs().max() / torchs.abs().max())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_gradients_of_every_dtype_are_those_of_torch(ranks: int) -> None:
    """torch divides or casts the result at once, except a mean in the gradients' own dtype."""
    for found in run_ranks(errors, ranks, [0] * ranks):
        assert max(found.values()) < 0.03, found


def read_at_once(hosts: list[int]) -> list[float]:
    """The sum of each gradient when it is accumulated, and at the end of the pass."""
    model, comm = sharded(hosts, "ring")
    assert comm is not None
    sums: dict[nn.Parameter, float] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: sums.update({p: float(p.grad.to_local().sum())})
        )
    with comm.one_pass():
        model(torch.randn(4, 30) + dist.get_rank()).square().mean().backward()
    comm.close()
    return [sums[p] - float(p.grad.to_local().sum()) for p in model.parameters()]  # type: ignore[union-attr]


def test_who_reads_a_gradient_as_it_is_accumulated_reads_the_mean() -> None:
    for differences in run_ranks(read_at_once, 3, [0] * 3):
        assert differences == [0.0] * 6


def written_at_once(hosts: list[int]) -> str:
    model, comm = sharded(hosts, "ring")
    assert comm is not None and isinstance(model[1], FSDPModule)
    model[1].set_all_reduce_hook(lambda gradients: gradients.mul_(2))
    try:
        with comm.one_pass():
            model(torch.randn(4, 30)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_who_writes_to_gradients_that_have_not_come_is_refused() -> None:
    for error in run_ranks(written_at_once, 2, [0] * 2):
        assert "the reduce-scatter of unit 1, " in error and "written to before it had come" in error


def out_of_step(hosts: list[int]) -> str:
    """Rank 1 skips a unit in its second pass, and continues with an equal one."""
    model, comm = sharded(hosts, "ring", timeout_s=5.0)
    assert comm is not None
    try:
        for left_out in (False, dist.get_rank() == 1):
            with comm.one_pass():
                first = torch.randn(4, 30) if left_out else model[0](torch.randn(4, 30))
                model[1](first).sum().backward()
    except CommError as error:
        return f"{error.peer}: {error}"
    return "no error"


@pytest.mark.parametrize("hosts", [[0, 0], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_a_unit_that_one_rank_leaves_out_is_noticed_by_the_deadline(hosts: list[int]) -> None:
    first, second = run_ranks(out_of_step, 2, hosts)
    assert first.startswith("1: the all-gather of unit 0, ") and "stopped at rank 0" in first
    assert second.startswith("0: the all-gather of unit 1, ") and "stopped at rank 1" in second
