"""Preparations of a run for a GPU, as far as they can be tested without one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runs import settings
from trainer import accelerator
from trainer.checkpoint.writing import Saving, host_stager
from trainer.distributed.backend_flags import described, set_backend_flags, set_deterministic
from trainer.distributed.collectives import broadcast_tensors
from trainer.distributed.gpu_sharing import count_per_gpu, environment
from trainer.distributed.process_group import _join
from trainer.errors import UserError
from trainer.guards.failure_snapshot import FailureSnapshot
from trainer.launch.rank_info import RankInfo
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim import param_groups
from trainer.optim.schedules import constant
from trainer.report.mfu import peak_tflops
from trainer.state.train_state import Progress, TrainState
from trainer.strategies import ddp
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.strategies.data_parallel import GpuReplica

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def switches() -> Iterator[None]:
    """Restore torch's flags."""
    cudnn, products = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(products)
    cudnn.allow_tf32, cudnn.benchmark = before


def test_the_settings_choose_tf32_and_cudnn_and_the_table_names_them(switches: None) -> None:
    train = settings("train.matmul_precision=highest", "train.cudnn_benchmark=false").train
    set_backend_flags(train, GPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert described(train, GPU) == "fp32"

    train = settings().train
    set_backend_flags(train, CPU)
    assert torch.get_float32_matmul_precision() == "highest", "a CPU's arithmetic is left alone"
    set_backend_flags(train, GPU)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.benchmark
    assert described(train, GPU) == "fp32, products in TF32, cudnn.benchmark"
    assert described(train, CPU) == "fp32"


def test_an_exact_run_uses_deterministic_kernels_without_filling_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled, chosen = torch.utils.deterministic.fill_uninitialized_memory, list[bool]()
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, name == "benchmark")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(GPU)
    assert chosen == [True] and torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_optimizers_are_fused_where_supported() -> None:
    def fused(target: str, fused_on_cpu: bool = True, **options: Any) -> Any:
        optim = {"_target_": f"torch.optim.{target}", "lr": 0.1, **options}
        made = param_groups.build_optimizer(TrainableParameters(nn.Linear(2, 2)), optim, fused_on_cpu)
        return made.param_groups[0].get("fused")

    assert not fused("AdamW", fused_on_cpu=False), "on a CPU it has other last bits in shards"
    assert fused("AdamW") and fused("SGD", momentum=0.9)
    assert fused("AdamW", weight_decay=0.1, no_decay={"below_dims": 2}), "with groups, too"
    assert not fused("AdamW", foreach=True)
    assert fused("AdamW", fused=False) is False
    assert not fused("Adagrad")
    sparse = nn.Embedding(3, 2, sparse=True)
    made = param_groups.build_optimizer(
        TrainableParameters(sparse), {"_target_": "torch.optim.SGD", "lr": 0.1}
    )
    assert not made.defaults["fused"]


def state_of(kind: type[torch.optim.Optimizer], **options: Any) -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.5, **options)  # type: ignore[call-arg]
    return TrainState(
        TrainableParameters(model),
        optimizer,
        constant(optimizer),
        torch.amp.GradScaler("cpu", enabled=False),
        Progress(),
    )


def test_fused_and_foreach_are_not_restored_from_a_checkpoint() -> None:
    """A run saved on a GPU resumes on a CPU, and the reverse."""
    saved = state_of(torch.optim.AdamW, fused=True).state_dict()
    here = state_of(torch.optim.AdamW)
    here.load_state_dict(saved)
    assert not here.optimizer.param_groups[0]["fused"]
    assert here.optimizer.param_groups[0]["lr"] == 0.5


def test_convolutions_have_the_memory_format_of_the_images() -> None:
    strategy = Strategy(CPU, ComputeOptions(channels_last=True))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    before = model[0].weight.detach().clone()
    strategy.wrap(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[2].weight.stride() == (4, 1, 4, 4), "a convolution of 1x1 is so, too"
    assert torch.equal(model[0].weight, before)
    assert model(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_a_saving_thread_uses_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        accelerator, "use", lambda device: chosen.append((threading.current_thread().name, device))
    )
    third = torch.device("cuda", 3)
    Saving(write=lambda: None, device=third).wait()
    assert chosen.pop() == ("checkpoint", third)
    for name in ("stream", "current_stream", "event"):
        monkeypatch.setattr(accelerator, name, lambda device: accelerator._DONE)
    host_stager(third)({}, ()).result()
    assert chosen.pop() == ("staging", third)
    snapshot = FailureSnapshot.__new__(FailureSnapshot)
    snapshot._ranks, snapshot._stream = SimpleNamespace(device=third), accelerator._DONE  # type: ignore[assignment]
    snapshot._own_stream()
    assert chosen.pop()[1] == third


def copied(module: nn.Module, factor: float) -> nn.Module:
    """Return `module` as a DataParallel replica, with plain tensors as parameters, and with other values."""
    modules = list(module.modules())
    copies = {one: one._replicate_for_data_parallel() for one in modules}
    for one, copy in copies.items():
        for name, child in one.named_children():
            setattr(copy, name, copies[child])
        for name, parameter in one.named_parameters(recurse=False):
            setattr(copy, name, parameter * factor)
    return copies[module]


def test_each_dp_replica_uses_its_own_weights_and_the_runs_precision() -> None:
    replica = GpuReplica(nn.Linear(3, 2), Strategy(CPU, ComputeOptions("bf16")).autocast)
    x, outputs = torch.randn(4, 3), {}
    # As in parallel_apply: a thread for each copy, where autocast is on with a dtype of its own.
    for factor in (1.0, 2.0, 4.0):

        def call(factor: float = factor) -> None:
            with torch.autocast("cpu", torch.float16):
                outputs[factor] = copied(replica, factor)(x)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert outputs[1.0].dtype == torch.bfloat16
    assert torch.equal(outputs[2.0], 2 * outputs[1.0]) and torch.equal(outputs[4.0], 4 * outputs[1.0])


def test_devices_are_found_by_type_and_mps_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    for kind, wanted, found in (
        ("cuda", "auto", ("cuda", 3)),
        ("cuda", "cuda", ("cuda", 3)),
        ("cuda", "cpu", ("cpu", 0)),
        ("cuda", "xpu", ("cpu", 0)),
        ("mps", "auto", ("cpu", 0)),
        ("mps", "mps", ("mps", 3)),
    ):
        device = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, d=device: d)
        assert accelerator.found(wanted) == found, (kind, wanted)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert accelerator.found("auto") == ("cpu", 0)


def test_features_of_each_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    mac, chosen = torch.device("mps", 0), list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=mac: chosen.append(device))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: (device, enable_timing))
    assert accelerator.event(GPU, timing=True) == (GPU, True), "without it, elapsed_time raises"
    assert accelerator.double(torch.ones(1)).dtype == torch.float64
    for device in (CPU, torch.device("meta"), GPU):
        accelerator.use(device)
        accelerator.synchronize(device)
    accelerator.event(CPU).synchronize()
    assert chosen == [GPU, GPU]
    accelerator.event(mac).synchronize()
    assert chosen.pop() == mac, "a copy to the host is complete then"
    assert [accelerator.backend_of(device) for device in (CPU, GPU, mac)] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "gloo",
    ]
    assert [accelerator.name(device) for device in (CPU, GPU)] == ["cpu", "H100"]
    assert [accelerator.can_pin(device) for device in (CPU, GPU, mac)] == [False, True, False]
    assert [accelerator.for_sums(device) for device in (CPU, GPU, mac)] == [CPU, GPU, CPU]
    assert accelerator.peak_memory_bytes([CPU, GPU]) == {"cuda:0": 7}
    for device in (CPU, mac):
        (peak,) = accelerator.peak_memory_bytes([device]).values()
        assert 1 << 26 < peak < 1 << 40, "the resident set size, in bytes"
    assert accelerator.event(CPU).query() and accelerator.stream(mac) is accelerator.current_stream(mac)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Join the group as rank 1 of a host whose rank 0 has GPU-0; return the device to which it is bound."""
    bound: list[object] = []

    def init(*_: object, device_id: object, timeout: timedelta, **__: object) -> None:
        assert timeout.total_seconds() > settings().distributed.timeout_s, "NCCL's watchdog names nobody"
        bound.append(device_id)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(accelerator, "use", lambda device: None)

    def joined(gpus: int, *overrides: str, ranks: int = 2, under_torchrun: bool = True) -> object:
        monkeypatch.setattr(accelerator, "found", lambda wanted: ("cuda", gpus))
        last = ranks - 1
        here = RankInfo(last, ranks, last, ranks, 0, "torchrun" if under_torchrun else "srun", "env://")
        _join(settings(*overrides).distributed, here, [0] * ranks, dist.HashStore())
        return bound.pop()

    return joined


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int, int], None]]:
    """Set NCCL's version, without MPS; remove the variables that a run sets."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    before = dict(os.environ)
    yield lambda *version: monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    os.environ.clear()
    os.environ.update(before)


def test_ranks_share_a_gpu_only_if_configured(
    join: Callable[..., object], nccl: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl(2, 30)
    with pytest.raises(UserError, match=r"local rank 1 has no GPU of its own.*ranks_per_gpu=2, or"):
        join(1)
    with pytest.raises(
        UserError, match=r"per_gpu=2; start at most 4 processes per host, .*ranks_per_gpu=3, or"
    ):
        join(2, "distributed.ranks_per_gpu=2", ranks=6)
    assert join(1, under_torchrun=False) == GPU, "srun shows each process its own"
    monkeypatch.setenv("RINGMASTER_LAUNCHER", "local")
    with pytest.raises(UserError, match="local rank 1 has no GPU of its own"):
        join(1, under_torchrun=False)
    assert join(2, "distributed.ranks_per_gpu=auto") == torch.device("cuda", 1)
    assert join(1, "distributed.ranks_per_gpu=auto", "distributed.backend=gloo") is None, (
        "gloo binds to no device"
    )
    assert not {name for name in os.environ if name.startswith("NCCL_")}
    assert join(2, "distributed.ranks_per_gpu=auto", ranks=3) == torch.device("cuda", 1)
    assert join(1, "distributed.ranks_per_gpu=auto") == GPU
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_MAX_CTAS" not in os.environ


def test_mps_is_refused_for_ranks_that_share_a_gpu(
    join: Callable[..., object], nccl: Callable[[int, int], None], tmp_path: Path
) -> None:
    (tmp_path / "control").touch()
    join(2)
    with pytest.raises(UserError, match=r"under NVIDIA MPS.*CUDA_MPS_PIPE_DIRECTORY=/dev/null"):
        join(1, "distributed.ranks_per_gpu=auto")


# Without a GPU to share, nothing is set. Neighbours share, since NCCL turns NVLS off by the last two ranks.
SHARED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
BY_HOST = SHARED | {"NCCL_HOSTID": "R", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
BY_FLAG = SHARED | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize("version", [(2, 28, 9), (2, 29, 7), (2, 30, 7)], ids=str)
@pytest.mark.parametrize(
    ("ranks", "gpus", "devices", "of_new", "of_old"),
    [
        (2, 2, "01", {}, {}),
        (2, 1, "00", BY_FLAG, BY_HOST),
        (4, 2, "0011", BY_FLAG, BY_HOST),
        (3, 2, "001", BY_FLAG, BY_HOST),
        (4, 1, "0000", BY_FLAG | {"NCCL_MAX_CTAS": "4"}, BY_HOST),
    ],
)
def test_ranks_get_the_variables_that_their_nccl_needs(
    version: tuple[int, ...],
    ranks: int,
    gpus: int,
    devices: str,
    of_new: dict[str, str],
    of_old: dict[str, str],
) -> None:
    hosts, each = set(), count_per_gpu("auto", gpus, [0] * ranks)
    for rank in range(ranks):
        assert rank // each == int(devices[rank])
        got = environment(version, each, rank, num_hosts=1, given={})
        if "NCCL_HOSTID" in got:
            hosts.add(got["NCCL_HOSTID"])
            got["NCCL_HOSTID"] = "R"
        assert got == (of_new if version >= (2, 30) else of_old)
    assert len(hosts) in (0, ranks), "NCCL would find two ranks of a host on a GPU"


def test_the_users_variables_are_used_or_refused() -> None:
    given = {"NCCL_PROTO": "LL", "NCCL_HOSTID": "mine", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_NVLS_ENABLE": "0"}
    got = environment((2, 29, 7), 2, 1, num_hosts=2, given=given)
    assert given | got == given | {"NCCL_ALGO": "Ring", "NCCL_HOSTID": "mine-rank1"}, (
        "hosts choose the network"
    )
    for name, value in (("NCCL_NVLS_ENABLE", "1"), ("NCCL_MULTI_RANK_GPU_ENABLE", "0")):
        with pytest.raises(UserError, match=f"{name}={value} is not supported .* unset {name}"):
            environment((2, 30, 7), 2, 0, num_hosts=1, given={name: value})
    with pytest.raises(UserError, match="auto requires a single host, but this run has 2"):
        count_per_gpu("auto", 1, [0, 1])
    assert count_per_gpu(4, 1, [0, 0]) == 2 and count_per_gpu(4, 1, [0]) == 1, "no more than there are"
    assert count_per_gpu(4, 1, [0, 0, 0, 1]) == 3, "all ranks need the same NCCL_ALGO"


def test_a_multi_gpu_model_uses_a_group_that_supports_all_its_devices(
    join: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert join(4) is None, "a rank has two"
    assert join(2) == torch.device("cuda", 1)
    sent: list[str] = []
    monkeypatch.setattr(dist, "broadcast", lambda message, src: sent.append(message.device.type))
    broadcast_tensors([torch.ones(1, device=kind) for kind in ("cpu", "cpu", "meta")], 0)
    assert sent == ["cpu", "meta"]


def test_sparse_gradients_are_refused_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **_: SimpleNamespace(module=model))
    monkeypatch.setattr(ddp, "broadcast_tensors", lambda tensors, src: None)
    monkeypatch.setattr(ddp.Ddp, "_place", lambda strategy, model: model)
    facts: Any = SimpleNamespace(
        device=GPU, backend="cpu:gloo,cuda:nccl", hosts=(0, 1), world_size=2, rank=0, heartbeat=None
    )
    config = settings("strategy=ddp", "comm=native", "comm.timeline=false")
    strategy: Any = ddp.Ddp(config.strategy, config.comm, facts, ComputeOptions(), 60.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"distributed\.backend=gloo"):
        strategy.wrap(nn.Embedding(3, 2, sparse=True))


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA L40", None), ("NVIDIA L4", 121.0), ("NVIDIA A100-SXM4-40GB", 312.0)]
)
def test_a_gpu_name_is_matched_by_whole_words(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "name", lambda device: name)
    assert peak_tflops(GPU, "bf16") == peak
