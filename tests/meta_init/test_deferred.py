"""A model that is recorded and filled later equals the one that its constructor builds."""

import functools
import gc
import resource
import sys
from collections.abc import Callable
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
from tests.ranks import run_ranks
from tests.runs import context_of
from tests.strategies.test_fsdp import fsdp
from trainer.errors import UserError
from trainer.meta_init.deferred import Deferred, deferred


def filled(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    model = deferred(build, seed)
    assert not model.notes, model.notes
    assert all(tensor.is_meta for tensor in model.module.parameters())
    model.fill(model.module)
    return model.module


class Everything(nn.Module):
    """Old constructors, real data, values that are read, views, ties, and tensors that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.Tensor(30, 40))
        nn.init.xavier_uniform_(self.old)
        self.given = nn.Parameter(torch.zeros(3) + torch.from_numpy(np.arange(3, dtype=np.float32)))
        self.copied = nn.Linear(2, 2)
        with torch.no_grad():
            self.copied.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.copied.bias[0] = 7
            self.copied.bias[1:].fill_(8)
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.rates += torch.linspace(0, 1, 3).tolist()
        noise = torch.randn(10)
        self.register_buffer("noise", noise[:5].clone())
        self.register_buffer("twice", noise[:5] * 2, persistent=False)
        self.register_buffer("real", torch.tensor([1.0, 2.0]))
        self.positions, self.listed = torch.arange(6) * 2, [torch.ones(2), self.old]
        self.embed = nn.Embedding(10, 4, padding_idx=1)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.embed.weight
        self.lstm = nn.LSTM(4, 5)
        self.cast = nn.Linear(4, 4).bfloat16()
        self.orthogonal = nn.Parameter(torch.empty(20, 30))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(100, 100))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        self.normed = parametrizations.weight_norm(nn.Linear(3, 4))
        if (torch.ones(2) > 0).all():
            self.conditional = nn.Parameter(torch.eye(3))
        self.copies = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        )


def test_all_that_a_constructor_may_do() -> None:
    model, plain = filled(Everything), Everything()
    ours, theirs = model.state_dict(), plain.state_dict()
    assert [(name, value.shape, value.dtype, value.stride()) for name, value in ours.items()] == [
        (name, value.shape, value.dtype, value.stride()) for name, value in theirs.items()
    ]
    drawn = {"old", "truncated", "noise", "embed.weight", "tied.weight"}
    for name, value in theirs.items():
        if value.is_floating_point() and value.numel() > 900:
            assert ours[name].float().std().item() == pytest.approx(value.float().std().item(), rel=0.1), name
        is_random = name in drawn or name.split(".")[0] in ("lstm", "cast", "orthogonal", "normed", "copies")
        if not is_random:
            assert ours[name].equal(value), name
    assert model.truncated.abs().max() <= 0.03
    far = model.orthogonal @ model.orthogonal.T - torch.eye(20)  # type: ignore[operator, union-attr]
    assert far.abs().max() < 1e-5
    assert torch.equal(model.twice, model.noise * 2)  # type: ignore[operator, arg-type]
    assert model.rates == plain.rates and model.positions.equal(plain.positions)  # type: ignore[operator]
    assert model.tied.weight is model.embed.weight and model.listed[1] is model.old  # type: ignore[index, union-attr]
    assert model.embed.weight[1].abs().sum() == 0  # type: ignore[index, union-attr]
    assert model.lstm(torch.ones(1, 1, 4))[0].shape == (1, 1, 5)  # type: ignore[operator]
    layers = model.copies.layers  # type: ignore[union-attr]
    assert layers[0].linear1.weight.equal(layers[1].linear1.weight)  # type: ignore[index, union-attr]
    assert not layers[0].linear1.weight.equal(filled(Everything, 1).copies.layers[0].linear1.weight)  # type: ignore


def _gpt() -> nn.Module:
    return GPT(vocab_size=50, block_size=16, width=32, depth=2, num_heads=2)


def test_a_part_alone_has_the_values_it_has_in_the_whole() -> None:
    whole, model = filled(_gpt), deferred(_gpt, 0)
    parts = list(model.module.children())[:-1]
    for part in reversed(parts):
        model.fill(part)
    model.fill(model.module)
    for name, value in whole.state_dict().items():
        assert value.equal(model.module.state_dict()[name]), name


@pytest.mark.slow
def test_torchvisions_models() -> None:
    import torchvision.models as zoo

    for name in ("resnet18", "swin_t"):
        model = filled(lambda name=name: zoo.get_model(name, weights=None, num_classes=3))  # type: ignore[misc]
        plain = zoo.get_model(name, weights=None, num_classes=3)
        for key, value in plain.state_dict().items():
            ours = model.state_dict()[key]
            if value.numel() > 5000 and value.is_floating_point():
                assert ours.std().item() == pytest.approx(value.std().item(), rel=0.05), key


def _layers_of(kind: Callable[[int, int], nn.Module], number: int) -> Deferred:
    return deferred(lambda: nn.ModuleList(kind(2, 2) for _ in range(number)), 0)


def test_filling_takes_as_many_calls_for_each_tensor_of_many_as_of_few() -> None:
    calls = {}
    for number in (25, 100):
        model, events = _layers_of(nn.Linear, number), list[str]()
        sys.setprofile(lambda frame, event, argument, events=events: events.append(event))  # type: ignore[misc]
        model.fill(model.module)
        sys.setprofile(None)
        calls[number] = sum(event.endswith("call") for event in events)
    assert calls[100] < 4.5 * calls[25]


def test_all_objects_are_searched_once_for_all_weights_of_rnns(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    for name in ("get_objects", "get_referrers"):
        search = getattr(gc, name)
        monkeypatch.setattr(gc, name, lambda *args, search=search: searches.append("") or search(*args))
    numbers = []
    for number in (1, 8):
        searches.clear()
        assert not _layers_of(nn.LSTM, number).notes
        numbers.append(len(searches))
    assert 0 < numbers[0] == numbers[1]


class View(nn.Module):
    """Holds a view, as Swin's blocks hold one of their position table; with `hides`, also the table."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        table = torch.arange(6).reshape(2, 3) + 1
        self.register_buffer("flat", table.flatten())
        self.closure = (lambda: table) if hides else None


def test_what_a_view_is_of_is_hidden_only_where_somebody_holds_it() -> None:
    assert filled(lambda: View(hides=False)).get_buffer("flat").tolist() == [1, 2, 3, 4, 5, 6]
    assert len(deferred(lambda: View(hides=True), 0).notes) == 1


@functools.lru_cache
def _cached(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


class _Slots:
    __slots__ = ("table",)

    def __init__(self, table: Tensor) -> None:
        self.table = table


class Hides(nn.Module):
    """Tensors that no module lists; `tree` contains itself."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(3)
        self._private, self._listed = torch.ones(3), [torch.ones(3)]
        self.closure = lambda: ones * 2
        self.partial = functools.partial(torch.mul, torch.ones(3))
        self.slots, self.kept = _Slots(torch.ones(3)), {torch.ones(3)}
        self.teacher = [nn.Linear(3, 3).requires_grad_(False)]
        self.tree: dict[str, Any] = {"part": torch.ones(3)}
        self.tree["self"] = self.tree
        self.register_buffer("trained", torch.ones(3).requires_grad_())
        self.old = nn.utils.weight_norm(nn.Linear(3, 3))  # has a graph of its own
        _cached(3)

    def forward(self) -> list[Tensor]:
        of_lists = [self._private, *self._listed, *self.kept, self.tree["part"], self.trained]
        return [*of_lists, self.closure() / 2, self.partial(torch.ones(3)), self.slots.table]  # type: ignore


def test_what_no_module_lists_has_its_values_all_the_same() -> None:
    model = filled(Hides)
    assert all(value.equal(torch.ones(3)) for value in model())
    assert _cached(3).equal(torch.linspace(0, 1, 3)), "for the next caller"
    assert model.trained.requires_grad  # type: ignore[union-attr]
    teacher = model.teacher[0]  # type: ignore[index]
    assert teacher.weight.equal(filled(Hides).teacher[0].weight) and not teacher.weight.requires_grad  # type: ignore


class Generator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.fixed = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(1)))


class WritesNumPy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.data.numpy()[:] = 3


class SeedsApart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.fixed = nn.Parameter(torch.randn(3))


class HidesAView(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.slots = _Slots(self.weight.data[0])


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.bias.register_hook(lambda grad: grad * 2)


class HookedAfter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.bias.register_post_accumulate_grad_hook(lambda parameter: None)


class Scratch(nn.Sequential):
    """Weights that are copied through one NumPy array, one after the other."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(200, 200), nn.Linear(200, 200))
        scratch = np.empty((200, 200), np.float32)
        for number, layer in enumerate(self):
            scratch[:] = number
            layer.weight.data.copy_(torch.from_numpy(scratch))  # type: ignore[operator, union-attr]


class BySharedMemory(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}


class Penalised(nn.GRU):
    """A weight of a module with weak references to it, held by a function, too."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        weight = self.weight_hh_l0
        self.penalty = lambda: weight.square().sum()


class Seeds(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(2, 2)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Generator, "draws from its own generator"),
        (WritesNumPy, "read-only"),
        (Seeds, "seeds torch itself"),
        (SeedsApart, "seeds torch itself"),
        (Scratch, "it changes a tensor after it has used it"),
        (BySharedMemory, "it asks for the memory of a tensor"),
        (Penalised, "weight_hh_l0 of a Penalised is also referred to"),
        (HidesAView, "shares memory with a tensor of a module"),
        (Hooked, "bias has a hook on its gradient"),
        (HookedAfter, "bias has a hook on its gradient"),
        (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), "uses aten.geqrf"),
        (lambda: nn.LazyLinear(3), "is a UninitializedParameter"),
    ],
)
def test_what_no_tape_can_hold_is_built_whole(build: Callable[[], nn.Module], why: str) -> None:
    model = deferred(build, 0)
    assert len(model.notes) == 1 and why in model.notes[0]
    assert not any(tensor.is_meta for tensor in model.module.parameters())
    model.fill(model.module)
    again = deferred(build, 0).module
    if why != "is a UninitializedParameter":
        assert all(map(torch.equal, model.module.parameters(), again.parameters()))
    if build is Generator:
        assert model.module.fixed.equal(torch.randn(3, generator=torch.Generator().manual_seed(1)))  # type: ignore
    if build is Scratch:
        assert [layer.weight.unique().item() for layer in model.module] == [0, 1]  # type: ignore
    if build is WritesNumPy:
        assert model.module.weight.eq(3).all()  # type: ignore[operator, union-attr]


class AsksWhereItLies(nn.Module):
    """Writes through the results of `.cpu()` and `.to()`, once into each memory."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        third.weight = first.weight
        self.layers = nn.ModuleList([first, second, third])
        kinds = {parameter.type() for parameter in self.parameters()}
        assert kinds == {"torch.FloatTensor"}
        assert first.weight.to("cpu", torch.float32) is first.weight.to(torch.ones(1)) is first.weight
        assert first.weight.to("cpu", copy=True) is not first.weight
        assert first.weight.to("cpu", torch.float64).dtype is torch.float64
        with torch.no_grad():
            first.bias.detach().cpu().fill_(1)
            second.bias.data.to(torch.device("cpu")).fill_(2)
            seen: set[int] = set()
            for layer in self.layers:
                weight = layer.weight.data  # type: ignore[union-attr]
                if weight.data_ptr() not in seen:
                    weight.fill_(len(seen))  # type: ignore[operator]
                seen.add(weight.data_ptr())  # type: ignore[operator, arg-type]


def test_tensors_answer_as_those_of_a_cpu_do() -> None:
    assert not deferred(AsksWhereItLies, 0).notes
    model = filled(AsksWhereItLies)
    values = {name: value.unique().tolist() for name, value in model.named_parameters()}
    assert values["layers.0.weight"] == [0] and values["layers.1.weight"] == [1]
    assert values["layers.0.bias"] == [1] and values["layers.1.bias"] == [2]


class CachesAndDraws(Generator):
    def __init__(self) -> None:
        self.rates = _cached(5)
        super().__init__()


def test_what_a_cache_has_kept_of_an_attempt_is_real_for_the_next() -> None:
    _cached.cache_clear()
    model = deferred(CachesAndDraws, 0)
    assert "its own generator" in model.notes[0]
    assert model.module.rates.equal(torch.linspace(0, 1, 5))  # type: ignore[operator, union-attr]


@pytest.mark.slow
def test_the_garbage_collector_is_left_as_it_was() -> None:
    frozen = gc.get_freeze_count()
    deferred(lambda: nn.Linear(2, 2), 0)
    # By tests/conftest.py; frozen objects may still die when nothing refers to them.
    assert gc.get_freeze_count() > frozen / 2 > 0
    gc.unfreeze()
    try:
        assert len(deferred(lambda: View(hides=True), 0).notes) == 1
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()


class HalfWritten(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = nn.Parameter(torch.empty(3, 3))
        self.table.data[0] = 1


class Cache(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("cache", torch.empty(3), persistent=False)


def test_a_parameter_that_is_never_written_is_refused_by_name() -> None:
    model = deferred(HalfWritten, 0)
    with pytest.raises(UserError, match="6 of the 9 numbers of table are never initialised"):
        model.fill(model.module)
    assert filled(Cache).cache.tolist() == [0, 0, 0]  # type: ignore[operator, union-attr]


class Takes(nn.Linear):
    def __init__(self, take: Callable[[], Tensor]) -> None:
        super().__init__(2, 2)
        self.table = nn.Parameter(take(), requires_grad=False)


@pytest.mark.parametrize(
    "take",
    [
        lambda: torch.empty(3).bfloat16(),
        lambda: torch.empty(0).resize_(3),
        lambda: torch.empty(3, dtype=torch.complex64),
        lambda: torch.empty(3, dtype=torch.float8_e4m3fn),
        lambda: torch.empty(3, dtype=torch.int64),
    ],
)
def test_memory_as_it_came_is_found_in_every_dtype(take: Callable[[], Tensor]) -> None:
    model = deferred(partial(Takes, take), 0)
    with pytest.raises(UserError, match="3 of the 3 numbers of table are never initialised"):
        model.fill(model.module)


def test_weights_from_elsewhere_take_the_place_of_those_drawn() -> None:
    model = deferred(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 0)
    weight = torch.randn(4, 3)
    model.load({"0.weight": weight, "1.running_mean": torch.ones(4)})
    model.fill(model.module)
    state = model.module.state_dict()
    assert state["0.weight"].equal(weight) and state["1.running_mean"].equal(torch.ones(4))
    assert state["0.bias"].abs().sum() > 0


def _start(run_dir: Path, strategy: str) -> dict[str, Tensor]:
    with context_of(
        f"strategy={strategy}", f"run_dir={run_dir}", "data=digits", "model.hidden=[40,40]"
    ) as context:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in context.state.model.state_dict().items()
        }


@pytest.mark.slow
def test_ddp_and_fsdp_begin_with_the_same_bits(tmp_path: Path) -> None:
    single = run_ranks(_start, 1, tmp_path, "single", init=False)[0]
    sharded = run_ranks(_start, 2, tmp_path, "fsdp", init=False)[0]
    assert single.keys() == sharded.keys()
    for name, value in single.items():
        assert value.equal(sharded[name]), name


WIDTH, DEPTH = 3072, 6  # beyond 32 MiB the allocator gives memory back at once


def _layers(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def _memory_to_start() -> float:
    """By how many MB the peak grows to build and shard a model, once a small one has loaded all code."""
    for depth in (1, DEPTH):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = deferred(partial(_layers, depth), 0)
        wrapped = fsdp().wrap(model.module, model.fill)
        assert not any(parameter.is_meta for parameter in wrapped.parameters())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


@pytest.mark.slow
def test_no_rank_holds_the_whole_to_start() -> None:
    whole_mb = DEPTH * WIDTH**2 * 4 / 1e6
    assert max(run_ranks(_memory_to_start, 4)) < 0.6 * whole_mb


def test_the_generators_are_left_alone() -> None:
    """Later random numbers, such as dropout's, follow from the seed as if nothing had been replayed."""
    model: Deferred = deferred(lambda: nn.Linear(3, 3), 0)
    torch.manual_seed(7)
    expected: Any = torch.rand(3)
    torch.manual_seed(7)
    model.fill(model.module)
    assert torch.rand(3).equal(expected)
