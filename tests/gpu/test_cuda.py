"""Tests that need a GPU: synchronisation, communication hooks, copies and checkpoints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.runs import context_of, steps_of, train, whole_and_resumed
from tests.updates import run_of, update
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.ddp_hook import attach
from trainer.comm.executor import Executor
from trainer.comm.overlap import SideStream
from trainer.comm.timeline import BucketRecord, GpuClock
from trainer.data.device import Normalise, ToDevice
from trainer.errors import NonFiniteError
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer
from trainer.state.train_state import Progress, TrainState

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
_LONG = 400_000_000  # cycles: about 200 ms


@pytest.fixture
def group() -> Iterator[None]:
    """Create the process group of a run: one rank with NCCL."""
    torch.cuda.set_device(GPU)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    yield
    dist.destroy_process_group()


def host_seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Return the time of the host for `action` while the GPU is busy, and the time of the GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(_LONG)
    action()
    called = time.perf_counter() - begin
    torch.cuda.synchronize()
    return called, time.perf_counter() - begin


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(GPU)


@pytest.mark.usefixtures("group")
def test_the_gpu_skips_bad_updates_without_a_host_sync() -> None:
    model = network()
    trained = TrainableParameters(model)
    optimizer = build_optimizer(trained, {"_target_": "torch.optim.AdamW", "lr": 0.1})
    off = torch.amp.GradScaler("cuda", enabled=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    run = run_of(TrainState(trained, optimizer, schedule, off, Progress()), "cuda")
    run.strategy.share_updates = lambda: torch.cuda._sleep(4 * _LONG)  # what comes after the update

    def step(gradient: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        update(run)

    step(1.0)  # loads kernels
    called, busy = host_seconds(lambda: step(1.0))
    assert called < busy / 2, "the host waits for the gradients, and no longer"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteError, match=r"the gradient of 0.weight \(and 15 more\)"):
        step(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["native", *ALGORITHMS, "hook"])
def test_no_hook_changes_the_gradients_of_a_single_rank(algorithm: str, wire: str) -> None:
    """Use DDP in one process, which a normal run does not."""
    x = torch.randn(64, 256, device=GPU)
    right = gradients(network(), x)
    model = DistributedDataParallel(network(), device_ids=[0], bucket_cap_mb=0.5)
    powersgd = partial(powerSGD_hook, PowerSGDState(None, 1, start_powerSGD_iter=100))
    options: dict[str, Any] = {"hook": powersgd} if algorithm == "hook" else {}
    hook = attach(model, algorithm, hosts=(0,), wire_dtype=wire, **options)
    for _ in range(3):  # rebuilt after the first
        found = gradients(model, x)
    tolerance = {"rtol": 0.0, "atol": 0.0} if wire == "fp32" else {"rtol": 1e-2, "atol": 1e-6}
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    hook.timeline.metrics()  # reads the marks of all passes
    hook.close()


@pytest.mark.usefixtures("group")
def test_the_reducer_and_the_timer_do_not_wait() -> None:
    clock = GpuClock(GPU)
    nccl = dist.new_group(backend="nccl")
    executor = Executor(nccl, build("ring", 0, (0,)), GPU, torch.bfloat16)
    bucket = torch.randn(1_000_000, device=GPU)

    def all_reduce(given: Any, record: BucketRecord) -> torch.Tensor:
        executor.run(given.buffer())
        return bucket

    reducer = SideStream(all_reduce, clock)
    expected = bucket.clone()
    given: Any = type("Bucket", (), {"buffer": lambda self: bucket, "index": lambda self: 0})()
    records = [BucketRecord(0, bucket.nbytes, 0.0) for _ in range(3)]
    reducer.submit(given, records[0]).wait()
    called, busy = host_seconds(lambda: reducer.submit(given, records[1]))
    assert called < busy / 2
    assert torch.equal(bucket, expected)
    assert records[1].read_gpu is not None
    times = records[1].read_gpu(True)
    assert times is not None
    ready, start, end = times
    assert ready <= start <= end
    assert end - start < 60, "in seconds"


class OnTwo(nn.Module):
    """Has its first layer on the GPU and its second on the CPU, unless it is `whole`."""

    def __init__(self, whole: bool, **_: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(64, 32), nn.Linear(32, 10)
        self.first, self.second = first.to(GPU), second if not whole else second.to(GPU)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.flatten(1)).relu()
        output: torch.Tensor = self.second(hidden.to(self.second.weight.device))
        return output.to(images.device)


def test_a_model_on_two_devices_trains_like_on_one(tmp_path: Path) -> None:
    results = []
    for whole in (True, False):
        model = ("model=mlp", "model._target_=tests.gpu.test_cuda.OnTwo", f"+model.whole={whole}")
        options = (*model, "data=digits", "train.epochs=1", "train.clip_grad_norm=1")
        results.append(train("strategy=single", *options, f"run_dir={tmp_path}/{whole}"))
    assert results[0]["eval/loss"] == pytest.approx(results[1]["eval/loss"], rel=1e-4)
    again = train("strategy=single", *options, "train.epochs=2", f"run_dir={tmp_path}/False", "resume=auto")
    assert again["steps"] > results[1]["steps"]


def test_a_batch_is_copied_while_the_gpu_computes() -> None:
    to_device = ToDevice(GPU, channels_last=True, normalise=Normalise([0.5] * 3, [0.5] * 3, GPU))
    images = torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8).pin_memory()
    to_device(images)
    arrived: list[torch.Tensor] = []
    called, busy = host_seconds(lambda: arrived.append(to_device(images)))
    assert called < busy / 2
    assert arrived[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(arrived[0].cpu(), images / 127.5 - 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])  # fp16 reads its scale
def test_a_step_has_no_unintended_sync(precision: str, tmp_path: Path) -> None:
    options = ("experiment=text_gpt", "strategy=single", "train.log_every_steps=1000")
    options += ("train.eval_every_epochs=0", "checkpoint.every_epochs=null", f"run_dir={tmp_path}")
    with context_of(*options, f"train.precision={precision}") as context:
        way = steps_of(context)
        for _ in itertools.islice(way, 5):
            pass
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in itertools.islice(way, 5):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
        way.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_an_async_checkpoint_from_a_gpu_resumes_exactly(kind: str, tmp_path: Path) -> None:
    options = ("strategy=single", f"checkpoint={kind}", "checkpoint.async=true", "checkpoint.every_steps=3")
    options += ("train.eval_every_epochs=0", "train.epochs=1", "train.cudnn_benchmark=false", "optim=adamw")
    whole, resumed = whole_and_resumed(tmp_path, 3, *options, "train.max_steps=6")
    assert whole == resumed
