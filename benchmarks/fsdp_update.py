"""Measure the CPU time of the first and later updates with FSDP, compared with a plain PyTorch loop.

Both shard the same small layers as one unit, and make the same step of fused AdamW. In the plain loop, the
optimizer gets the model's DTensors, as in torch's tutorials. In Ringmaster, it gets the tensors of
`TrainableParameters`.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.fsdp_update [--tensors 125 500 1000 4000]
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer

_STEPS = 5


def ringmaster(model: nn.Module) -> Callable[[], None]:
    trainable = TrainableParameters(model)
    optimizer = build_optimizer(trainable, {"_target_": "torch.optim.AdamW", "lr": 1e-3})

    def update() -> None:
        trainable.attach_gradients()
        optimizer.step()
        trainable.drop_gradients()

    return update


def plain(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def seconds(num_tensors: int, prepare: Callable[[nn.Module], Callable[[], None]]) -> tuple[float, float]:
    """Return the CPU seconds of the first update and of the fastest later one; updates do not communicate."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(num_tensors)])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    update, times = prepare(model), []
    for _ in range(_STEPS):
        model(torch.ones(4, 8)).sum().backward()
        begin = time.process_time()
        update()
        times.append(time.process_time() - begin)
    return times[0], min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, nargs="+", default=[125, 500, 1000, 4000])
    parser.add_argument(
        "--plain-up-to", type=int, default=1000, help="largest number of tensors for the plain loop (1000)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number in options.tensors:
        words = [f"{number:,}"]
        for prepare in (ringmaster, plain):
            if prepare is ringmaster or number <= options.plain_up_to:
                first, later = seconds(number, prepare)
                words.append(f"{prepare.__name__}: first {first:.3f} s, later {1e3 * later:.1f} ms")
        if dist.get_rank() == 0:
            print("; ".join(words), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
