"""A model that is built on the meta device and filled later has the values of one that is built directly."""

import resource
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from models.gpt import GPT
from tests.checkpoint import tiny
from tests.ranks import run_ranks
from tests.runs import context_of
from tests.strategies.test_fsdp import fsdp
from trainer.strategies.meta_init import InitialModel, constructed, named_tensors, on_meta


class Everything(nn.Module):
    """Has old constructors, real data, views, tied weights, and tensors that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.Tensor(30, 40))
        nn.init.xavier_uniform_(self.old)
        self.given = nn.Parameter(torch.zeros(3) + torch.arange(3))
        self.copied = nn.Linear(2, 2)
        with torch.no_grad():
            self.copied.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.copied.bias[0] = 7
        noise = torch.randn(10)
        self.register_buffer("noise", noise[:5].clone())
        self.register_buffer("twice", noise[:5] * 2, persistent=False)
        self.register_buffer("from_numpy", torch.from_numpy(np.arange(3)))
        self.positions, self.listed = torch.arange(6) * 2, [torch.ones(2), self.old]
        self.embed = nn.Embedding(10, 4, padding_idx=1)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.embed.weight
        self.lstm = nn.LSTM(4, 5)
        self.norm = nn.BatchNorm1d(4)
        self.cast = nn.Linear(4, 4).bfloat16()
        self.normed = parametrizations.weight_norm(nn.Linear(3, 4))


class View(nn.Module):
    """Has a view as attribute, as Swin's blocks have one of their position table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", (torch.arange(6).reshape(2, 3) + 1).flatten())


class Reads(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.rates = torch.linspace(0, 0.3, 4).tolist()


class Hides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.teacher = [nn.Linear(3, 3).requires_grad_(False)]


class Shares(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("row", self.weight.data[0])


def _gpt() -> nn.Module:
    return GPT(vocab_size=50, block_size=16, width=32, depth=2, num_heads=2)


ON_META = (Everything, View, _gpt)
WHOLE = {
    Reads: "tolist|meta",
    Hides: "it stores tensors outside of module attributes",
    Shares: "share memory",
}


def test_models_that_can_be_built_on_meta() -> None:
    for build in ON_META:
        model, why = on_meta(build, 0)
        assert model is not None, (build, why)
        assert all(
            tensor.is_meta for tensor in model.parameters() if tensor is not getattr(model, "old", None)
        )


@pytest.mark.parametrize("build", WHOLE)
def test_models_that_cannot_be_built_on_meta_have_a_reason(build: type[nn.Module]) -> None:
    model, why = on_meta(build, 0)
    assert model is None
    assert any(words in why for words in WHOLE[build].split("|")), why


def _values(model: InitialModel) -> list[tuple[str, Tensor]]:
    """Return all tensors, filled as by a strategy: first parts, then the whole model."""
    for part in reversed(list(model.module.children())):
        model.fill(part)
    model.fill(model.module)
    return [(name, tensor.detach().clone()) for name, tensor in named_tensors(model.module)]


def _of_ranks() -> list[tuple[list[tuple[str, Tensor]], bool, tuple[str, ...]]]:
    ranks, found = tiny.facts(), []
    for build in (*ON_META, *WHOLE):
        model = constructed(build, 0, ranks)
        was_on_meta = any(tensor.is_meta for _, tensor in named_tensors(model.module))
        found.append((_values(model), was_on_meta, model.notes))
        if build is Everything:
            module: Any = model.module
            assert module.tied.weight is module.embed.weight and module.listed[1] is module.old
            assert module.lstm(torch.ones(1, 1, 4))[0].shape == (1, 1, 5)
    return found


def test_every_rank_has_the_values_of_a_single_process() -> None:
    first, second = run_ranks(_of_ranks, 2)
    for number, build in enumerate((*ON_META, *WHOLE)):
        alone = _values(constructed(build, 0, None))
        for values, _, notes in (first[number], second[number]):
            assert [name for name, _ in values] == [name for name, _ in alone]
            assert all(one.equal(other) for (_, one), (_, other) in zip(values, alone, strict=True)), build
            assert bool(notes) == (build not in ON_META), (build, notes)
        assert second[number][1] == (build in ON_META)
    assert not first[0][1]


def _extended() -> list[tuple[str, Tensor]]:
    def extend(module: nn.Module) -> None:
        own = next(module.parameters())
        module.added = nn.Linear(5, 5).to(own.device)
        module.norms = nn.Parameter(torch.empty(3) if own.is_meta else own.detach().flatten()[:3].clone())

    model = constructed(_normed, 0, tiny.facts() if torch.distributed.is_initialized() else None)
    model.extend(extend)
    return _values(model)


def test_additions_to_a_model_have_the_same_values_on_every_rank() -> None:
    """Also if they depend on the model's values, such as the weight norms of DoRA."""
    (alone,) = run_ranks(_extended, 1, init=False)
    for rank in run_ranks(_extended, 2):
        assert [name for name, _ in rank] == [name for name, _ in alone]
        assert all(one.equal(other) for (_, one), (_, other) in zip(rank, alone, strict=True))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def _loaded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    model = constructed(_normed, 0, tiny.facts())
    model.load(lambda: tensors)
    return dict(_values(model))


def test_loaded_weights_replace_the_initial_ones() -> None:
    drawn = dict(_values(constructed(_normed, 0, None)))
    given = {name: torch.randn(drawn[name].shape) for name in ("0.weight", "1.running_mean")}
    for rank in run_ranks(_loaded, 2, given):
        assert all(rank[name].equal(value) for name, value in given.items())
        assert all(value.equal(drawn[name]) for name, value in rank.items() if "bias" in name)


def _start(run_dir: Path, strategy: str) -> dict[str, Tensor]:
    overrides = (f"strategy={strategy}", f"run_dir={run_dir}", "data=digits", "model.hidden=[40,40]")
    with context_of(*overrides) as context:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in context.state.model.state_dict().items()
        }


@pytest.mark.slow
def test_ddp_and_fsdp_start_with_the_same_bits(tmp_path: Path) -> None:
    single = run_ranks(_start, 1, tmp_path, "single", init=False)[0]
    for strategy in ("ddp", "fsdp"):
        for other in run_ranks(_start, 2, tmp_path, strategy, init=False):
            assert single.keys() == other.keys()
            assert all(value.equal(other[name]) for name, value in single.items())


WIDTH, DEPTH = 3072, 4  # beyond 32 MiB the allocator gives memory back at once


def _layers(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def _memory_to_start() -> float:
    """Return the peak memory in MB to build and shard a model, after a small model has loaded all code."""
    for depth in (1, DEPTH):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = constructed(partial(_layers, depth), 0, tiny.facts())
        wrapped = fsdp().wrap(model.module, model.fill)
        assert not any(parameter.is_meta for parameter in wrapped.parameters())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


@pytest.mark.slow
def test_only_rank_0_has_the_whole_model_at_start() -> None:
    whole_mb = DEPTH * WIDTH**2 * 4 / 1e6
    first, *others = run_ranks(_memory_to_start, 4)
    assert max(others) < 0.6 * whole_mb < first
