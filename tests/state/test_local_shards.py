"""Under FSDP an optimizer updates plain local shards, which share memory with the model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.ranks import run_ranks
from trainer.model.trainable_parameters import TrainableParameters


class Rows(nn.Module):
    """The last three of four ranks have no rows of its first parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList([torch.randn(rows, 3) for rows in (1, 2, 3, 7, 8)])
        self.parts.append(nn.Parameter(torch.ones(2), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x @ part.t()).square().sum() for part in self.parts[:-1]), torch.zeros(()))


def sharded(hybrid: bool = False) -> Rows:
    names = ("replicate", "shard") if hybrid else ("shard",)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]] if hybrid else [0, 1, 2, 3], mesh_dim_names=names)
    return fully_shard(Rows(), mesh=mesh)  # type: ignore[return-value]


def _norms(hybrid: bool) -> dict[str, Any]:
    model = sharded(hybrid)
    trained, gradients = TrainableParameters(model), []
    for number, whole in enumerate(trained.whole.values()):
        assert isinstance(whole, DTensor)
        gradients.append(
            torch.randn(whole.shape, generator=torch.Generator().manual_seed(number)) * len(whole)
        )
        whole.grad = distribute_tensor(gradients[-1], whole.device_mesh, whole.placements)
    theirs = nn.utils.get_total_norm([whole.grad for whole in trained.whole.values()])  # type: ignore[misc]
    trained.attach_gradients()
    norm = trained.gradient_norm()
    nn.utils.clip_grads_with_norm_(trained.own.values(), 1.0, norm)
    clipped = [whole.grad.full_tensor() for whole in trained.whole.values()]  # type: ignore[union-attr]
    right = [gradient / (norm + 1e-6) for gradient in gradients]
    far = max(float((one - other).abs().max()) for one, other in zip(clipped, right, strict=True))
    trained.drop_gradients()
    left = [p.grad for p in (*trained.own.values(), *trained.whole.values()) if p.grad is not None]
    return {"norm": norm, "theirs": theirs.full_tensor(), "far": far, "left": left}  # type: ignore[operator]


def _steps(moves: bool) -> list[Tensor]:
    """Return the full model after three steps; with `moves`, its parameters are moved first."""
    model = sharded()
    trained = TrainableParameters(model)
    assert all(type(own) is nn.Parameter for own in trained.own.values())
    if moves:
        model._apply(lambda tensor: tensor.clone())
    optimizer = torch.optim.AdamW(trained.own.values(), lr=0.1, fused=True)
    for step in range(3):
        model(torch.full((2, 3), 1.0 + step)).backward()
        trained.attach_gradients()
        optimizer.step()
        trained.drop_gradients()
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def _all() -> tuple[list[dict[str, Any]], list[list[Tensor]]]:
    return [_norms(hybrid) for hybrid in (False, True)], [_steps(moves) for moves in (False, True)]


def test_shards_share_the_models_memory_and_have_the_norm_of_full_tensors() -> None:
    plain = Rows()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        plain(torch.full((2, 3), 1.0 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for norms, steps in run_ranks(_all, 4):
        for found in norms:
            assert found["norm"].equal(found["theirs"]) and found["norm"] > 10
            assert found["far"] < 1e-6 and not found["left"]
        for weights in steps:
            for ours, right in zip(weights, plain.parameters(), strict=True):
                torch.testing.assert_close(ours, right.detach(), rtol=0, atol=1e-6)
