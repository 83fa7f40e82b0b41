"""A run's preparations for a GPU, as far as they can be seen without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.played import Stream, streams  # noqa: F401
from tests.runs import settings
from trainer import accelerator
from trainer.checkpoint.background import Saving
from trainer.data.device import Mirrored, Normalise, ToDevice
from trainer.distributed.backend_flags import described, set_backend_flags
from trainer.distributed.process_group import _device
from trainer.errors import UserError
from trainer.optim import param_groups
from trainer.optim.schedules import constant
from trainer.optim.train_state import Progress, TrainState
from trainer.optim.trained import Trained
from trainer.strategies.base import Computing, Strategy
from trainer.strategies.data_parallel import GpuReplica

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def switches() -> Iterator[None]:
    """Restores torch's values."""
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


def test_a_batch_is_copied_beside_the_computation_and_kept_until_it_was_read(
    streams: list[tuple[str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = torch.Tensor.to

    def copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        streams.append((Stream.current.name, f"copies {tensor.ndim}-d {tensor.dtype}"))
        return to(tensor)

    monkeypatch.setattr("trainer.data.device.is_accelerator", lambda device: True)
    to_device = ToDevice(GPU, channels_last=True, normalise=None)
    to_device.normalise = Normalise([0.5], [0.5], CPU)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    ready, _ = to_device(Mirrored((images, torch.tensor([0, 1])), torch.tensor([True, False])))
    assert streams == [
        ("side", "copies 4-d torch.uint8"),
        ("side", "copies 1-d torch.int64"),
        ("side", "copies 1-d torch.bool"),
        ("main", "waits for side"),
        ("main", "4-d kept for main"),
        ("main", "1-d kept for main"),
        ("main", "1-d kept for main"),
    ]
    assert torch.allclose(ready[0], images[0].flip(-1) / 127.5 - 1, atol=1e-6)
    assert torch.allclose(ready[1], images[1] / 127.5 - 1, atol=1e-6)


def test_a_step_is_fused_where_that_is_to_be_had() -> None:
    def fused(target: str, fused_on_cpu: bool = True, **options: Any) -> Any:
        optim = {"_target_": f"torch.optim.{target}", "lr": 0.1, **options}
        made = param_groups.build_optimizer(Trained(nn.Linear(2, 2)), optim, fused_on_cpu)
        return made.param_groups[0].get("fused")

    assert not fused("AdamW", fused_on_cpu=False), "on a CPU it has other last bits in shards"
    assert fused("AdamW") and fused("SGD", momentum=0.9)
    assert fused("AdamW", weight_decay=0.1, undecayed={"below_dims": 2}), "with groups, too"
    assert not fused("AdamW", foreach=True)
    assert fused("AdamW", fused=False) is False
    assert not fused("Adagrad")
    sparse = nn.Embedding(3, 2, sparse=True)
    made = param_groups.build_optimizer(Trained(sparse), {"_target_": "torch.optim.SGD", "lr": 0.1})
    assert not made.defaults["fused"]


def state_of(kind: type[torch.optim.Optimizer], **options: Any) -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.5, **options)  # type: ignore[call-arg]
    return TrainState(
        Trained(model), optimizer, constant(optimizer), torch.amp.GradScaler("cpu", enabled=False), Progress()
    )


def test_how_a_step_is_made_is_not_taken_over_from_a_checkpoint() -> None:
    """A run saved on a GPU resumes on a CPU, and the reverse."""
    saved = state_of(torch.optim.AdamW, fused=True).state_dict()
    here = state_of(torch.optim.AdamW)
    here.load_state_dict(saved)
    assert not here.optimizer.param_groups[0]["fused"]
    assert here.optimizer.param_groups[0]["lr"] == 0.5


def test_convolutions_are_laid_out_as_the_images_are() -> None:
    strategy = Strategy(CPU, Computing(channels_last=True))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = model[0].weight.detach().clone()
    strategy.wrap(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model[0].weight, before)
    assert model(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_a_thread_that_saves_works_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        accelerator, "use", lambda device: chosen.append((threading.current_thread().name, device))
    )
    Saving(write=lambda: None, device=torch.device("cuda", 3)).done()
    assert chosen == [("checkpoint", torch.device("cuda", 3))]


def copied(module: nn.Module, factor: float) -> nn.Module:
    """`module` as DataParallel copies it to a GPU: with plain tensors for parameters, here with other values."""
    modules = list(module.modules())
    copies = {one: one._replicate_for_data_parallel() for one in modules}
    for one, copy in copies.items():
        for name, child in one.named_children():
            setattr(copy, name, copies[child])
        for name, parameter in one.named_parameters(recurse=False):
            setattr(copy, name, parameter * factor)
    return copies[module]


def test_each_of_dps_copies_computes_with_its_own_weights_in_the_runs_precision() -> None:
    replica = GpuReplica(nn.Linear(3, 2), Strategy(CPU, Computing("bf16")).autocast)
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


def test_ranks_share_a_gpu_only_where_nccl_was_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "found", lambda wanted: ("cuda", 1))
    here: Any = SimpleNamespace(under_torchrun=True, world_size=2)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(UserError, match="local rank 1 has no own GPU"):
        _device("auto", 1, here)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _device("auto", 1, here) == GPU
