"""A small model in training, plain or sharded, with state that can be compared."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.tree import take_apart
from trainer.checkpoint.weights import weights_for
from trainer.config import CheckpointConfig
from trainer.distributed.ranks import Ranks
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import Progress, TrainState
from trainer.tensors.generators import seed_micro_batch

CPU = torch.device("cpu")
CONFIG = {"seed": 0, "strategy.name": "test", "optim.lr": 0.1, "run_dir": "here"}


def settings(**changes: Any) -> CheckpointConfig:
    values: dict[str, Any] = {
        "format": "full",
        "every_steps": None,
        "every_epochs": 1,
        "every_minutes": None,
        "keep_last": 2,
        "keep_best": None,
        "keep_every": None,
        "async_": False,
        "timeout_s": 60.0,
    }
    return CheckpointConfig(**{**values, **changes})


def facts(device: torch.device = CPU) -> Ranks:
    rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    return Ranks(rank, rank, world, world, (0,) * world, device, "gloo")


def checkpointer(
    run_dir: Path,
    device: torch.device = CPU,
    run_id: str = "tiny",
    state: TrainState | None = None,
    **changes: Any,
) -> Checkpointer:
    """Return a checkpointer to save ``state``, or to ``restore`` a checkpoint that it opens."""
    if state is not None and state.trainable.is_sharded:
        changes = {"format": "sharded", **changes}
    made = Checkpointer(
        settings(**changes), run_dir, facts(device), run_id=run_id, num_samples=48, config=CONFIG
    )
    if state is not None:
        made.bind(state)
    return made


def restore(checkpointer: Checkpointer, state: TrainState, resume: str | None) -> bool:
    """Continue from the checkpoint that ``resume`` names; return False if there is none."""
    source = checkpointer.open(resume)
    checkpointer.bind(state)
    return source is not None


class Net(nn.Module):
    """Parameters that do not divide evenly, buffers, dropout, and a parameter that never gets a gradient.

    ``passes`` is a buffer that is not persistent, though forward uses it.
    """

    passes: Tensor

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(width, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        x = x * (1 + self.passes / 10)
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


def train_state(
    sharded: bool = False,
    width: int = 7,
    seed: int = 0,
    optimizer: str = "adamw",
    device: torch.device = CPU,
) -> TrainState:
    torch.manual_seed(seed)
    model = Net(width).to(device)
    if sharded:
        mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: str = "adamw") -> TrainState:
    trained = TrainableParameters(model)
    own = trained.own.values()
    if optimizer == "adamw":
        optim: torch.optim.Optimizer = torch.optim.AdamW(own, lr=0.01)
    else:
        optim = torch.optim.SGD(own, lr=0.01, momentum=0.9 if optimizer == "momentum" else 0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optim, [3, 6])
    scaler = torch.amp.GradScaler(next(iter(own)).device.type, init_scale=8.0, growth_interval=3)
    return TrainState(trained, optim, schedule, scaler, Progress())


def train(state: TrainState, steps: int, before_update: Callable[[], None] = lambda: None) -> None:
    """Make ``steps`` optimizer steps, four to an epoch, on data that depends only on the step."""
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.progress.step)
        x = torch.randn(12, 5, generator=generator)
        state.model.train()
        device = next(state.model.parameters()).device
        seed_micro_batch(5, state.progress.step, torch_dist.get_rank(), [device])
        loss = state.model(x.to(device)).square().mean()
        state.scaler.scale(loss).backward()
        for parameter in state.model.parameters():
            if parameter.grad is not None and parameter.is_cpu and not isinstance(parameter, DTensor):
                torch_dist.all_reduce(parameter.grad, torch_dist.ReduceOp.SUM)
        before_update()
        state.trainable.attach_gradients()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.schedule.step()
        state.trainable.drop_gradients()
        state.progress.advance(12, 48)


def everything(state: TrainState) -> dict[str, Any]:
    """Return the full ``state`` as CPU tensors and plain values."""
    tensors, plain = take_apart(state.state_dict())
    return {"tensors": whole(tensors), "plain": plain}


def load_weights(model: nn.Module, path: str | Path, ignore: str | Sequence[str] = ()) -> None:
    """Load the weights of a file, as model.init_from does."""
    model.load_state_dict(weights_for(model, path, ignore), strict=False)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return full copies of ``tensors`` on the CPU (a collective)."""
    full = {k: value.full_tensor() if isinstance(value, DTensor) else value for k, value in tensors.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in full.items()}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["plain"] == b["plain"]
    assert a["tensors"].keys() == b["tensors"].keys()
    for name, tensor in a["tensors"].items():
        assert torch.equal(tensor, b["tensors"][name]), name
