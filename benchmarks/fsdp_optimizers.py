"""Compare optimizers with FSDP on 2 and 3 ranks with one process: how each is run, and the final weights.

    pip install pytorch-optimizer prodigyopt lion-pytorch dadaptation torchao bitsandbytes   # optional
    python -m benchmarks.fsdp_optimizers [--json FILE] [--only NAME ...]

A small model whose tensors have various shapes, some with fewer rows than ranks, makes 20 steps with the same
gradients on each rank. After 10 steps, the state is saved and loaded into a new optimizer. The exit status is
1 if an optimizer gives wrong weights.
"""

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR

from tests.ranks import run_ranks
from trainer.checkpoint.tree import put_together, take_apart
from trainer.errors import UserError
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.optimizers import check_optimizer
from trainer.optim.param_groups import build_optimizer
from trainer.optim.whole_tensors import whole_parts
from trainer.state.progress import Progress
from trainer.state.train_state import TrainState

STEPS, SAVED_AT = 20, 10
OTHERS = {
    "benchmarks.fsdp_optimizers": ("ByNorm", "ShampooLike", "ClipsAll", "StepOfLBFGS"),
    "lion_pytorch": ("Lion",),
    "prodigyopt": ("Prodigy",),
    "dadaptation": ("DAdaptAdam", "DAdaptSGD"),
    "pytorch_optimizer": (
        *("Lamb", "LARS", "Lion", "AdaFactor", "Prodigy", "Shampoo", "SOAP", "AdEMAMix", "Adan"),
        *("AdaBelief", "StableAdamW", "CAME", "ScheduleFreeAdamW", "SM3", "NovoGrad"),
    ),
    "torchao.optim": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "bitsandbytes.optim": ("AdamW8bit", "Lion8bit", "LAMB", "LARS"),
}


class ByNorm(torch.optim.Optimizer):
    """Updates each tensor by its normalised gradient times lr."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-8))


class ShampooLike(ByNorm):
    """Preconditions gradients by a running product of their rows; counts steps in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.reshape(len(p), -1)
                product = self.state[p].setdefault("product", torch.eye(len(p), dtype=p.dtype))
                product += gradient @ gradient.T
                values, vectors = torch.linalg.eigh(product)
                p.sub_(group["lr"] / self.calls * (vectors / values**0.25 @ vectors.T @ gradient).view_as(p))


class ClipsAll(ByNorm):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in given])
        for p in given:
            p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


class StepOfLBFGS(torch.optim.LBFGS):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr, max_iter=1)

    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: torch.zeros(()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(64, 72), (10, 64), (2, 10), (1, 8), (64,), (10,), (2,), (12, 4, 3, 3)]
        self.tensors = nn.ParameterList([torch.randn(shape) for shape in shapes])


def matrices() -> nn.Module:
    net = Net()
    net.tensors = nn.ParameterList([p for p in net.tensors if p.ndim == 2])
    return net


def gradient_of(number: int, step: int, shape: torch.Size) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number))
    rows = torch.logspace(-2, 1, len(drawn)).roll(7 * step)
    return drawn * rows.view(-1, *[1] * (len(shape) - 1))


def state_of(target: str, options: dict[str, Any], is_sharded: bool) -> TrainState:
    model = matrices() if target.endswith("Muon") else Net()
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trainable = TrainableParameters(model)
    optimizer = build_optimizer(trainable, {"_target_": target, "lr": 0.01, **options})
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(trainable, optimizer, ConstantLR(optimizer, 1.0), scaler, Progress())


def make_steps(state: TrainState, steps: range) -> None:
    for step in steps:
        for number, own in enumerate(state.trainable.own.values()):
            whole = list(state.trainable.whole.values())[number]
            gradient = gradient_of(number, step, whole.shape)
            if own is not whole:
                parts = gradient.chunk(dist.get_world_size())
                rank = dist.get_rank()
                gradient = parts[rank] if rank < len(parts) else gradient[:0]
            own.grad = gradient.clone()
        torch.manual_seed(step)
        state.optimizer.step()


def weights(state: TrainState) -> list[Tensor]:
    plain = [getattr(p, "full_tensor", lambda p=p: p)() for p in state.trainable.whole.values()]
    return [p.detach().clone() for p in plain]


def train(cases: list[tuple[str, dict[str, Any]]], is_sharded: bool) -> list[tuple[str, Any, Any]]:
    """Return for each case how it is run, the final weights, and the final weights of a resumed run."""
    torch.set_num_threads(1)
    found = []
    for target, options in cases:
        try:
            state = state_of(target, options, is_sharded)
            check_optimizer(state.optimizer)
            make_steps(state, range(SAVED_AT))
            saved = copy_of(state.state_dict())
            make_steps(state, range(SAVED_AT, STEPS))
            again = state_of(target, options, is_sharded)
            again.load_state_dict(saved)
            make_steps(again, range(SAVED_AT, STEPS))
            mode = "whole" if whole_parts(state.optimizer) else "shards" if is_sharded else "one process"
            found.append((mode, weights(state), weights(again)))
        except UserError as error:
            found.append((f"refused: {error}", None, None))
        except Exception as error:
            found.append((f"fails: {type(error).__name__}: {error}", None, None))
    return found


def copy_of(saved: dict[str, Any]) -> Any:
    """Copy a state as a checkpoint does."""
    tensors, plain = take_apart(saved)
    return put_together(plain, {name: tensor.clone() for name, tensor in tensors.items()})


def all_cases(only: list[str]) -> list[tuple[str, dict[str, Any]]]:
    cases: list[tuple[str, dict[str, Any]]] = []
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer":
            for options in ({}, {"foreach": True}, {"fused": True}):
                if options.keys() <= inspect.signature(kind).parameters.keys():
                    cases.append((f"torch.optim.{name}", options))
    for module, names in OTHERS.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        more = {"LARS": {"momentum": 0.9}} if module.startswith("bits") else {}
        cases += [(f"{module}.{name}", more.get(name, {})) for name in names if hasattr(found, name)]
    return [case for case in cases if not only or any(word in case[0] for word in only)]


def max_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    cases = all_cases(options.only)
    single = run_ranks(train, 1, cases, False, timeout_s=3600)[0]
    sharded = {size: run_ranks(train, size, cases, True, timeout_s=3600)[0] for size in (2, 3)}
    rows, wrong = [], 0
    for number, (target, chosen) in enumerate(cases):
        right = single[number]
        row: dict[str, Any] = {"optimizer": target, **chosen, "one process": right[0]}
        for size, found in sharded.items():
            mode, end, resumed = found[number]
            row[f"fsdp x{size}"] = mode
            if end is not None and right[1] is not None:
                row[f"apart x{size}"] = max_difference(end, right[1])
                row[f"resumed x{size}"] = max_difference(resumed, end)
                wrong += max(row[f"apart x{size}"], row[f"resumed x{size}"]) > 1e-4
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(f"{len(rows)} optimizers, {wrong} wrong")
    if options.json:
        versions = {"torch": torch.__version__}
        options.json.write_text(
            json.dumps({"versions": versions, "rows": rows, "wrong": wrong}, indent=1) + "\n"
        )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
