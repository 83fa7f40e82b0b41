"""FSDP divides any model into units that torch can gather, or raises an error that names the cause."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.config import FsdpConfig
from trainer.errors import UserError
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.strategies.fsdp import Fsdp
from trainer.strategies.sharding import ranks_by_host

MIN_PARAMS = 200


class Tied(nn.Module):
    """A model with a weight in two modules that would both be units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed((x[:, 0] * 5).long().clamp(0, 19))))


class TwoParents(nn.Module):
    """A model whose module is called from two places."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(16, 16)
        self.first, self.second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class SharedPart(nn.Sequential):
    """Blocks of the size of units that share a small module, as in timm's CoaT."""

    def __init__(self) -> None:
        shared = nn.LayerNorm(16)
        blocks = [nn.Sequential(shared, nn.Linear(16, 8), nn.Linear(8, 16)) for _ in range(2)]
        super().__init__(*blocks)


class ParentsFirst(nn.Module):
    """A model that lists its outer units first."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return [self.outer, self.outer[1], self.outer[1][0], self.outer]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


class Attention(nn.Module):
    """MultiheadAttention never calls its out_proj, which is large enough to be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :]
        return self.layer(self.attention(x, x, x, need_weights=False)[0])


class ReadsOthers(nn.Module):
    """Reads the weights of a module that is large enough to be a unit without calling it, as swin_t does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Sequential(nn.Linear(16, 16)), nn.ModuleList([nn.Linear(16, 16)] * 2)
        self.called = nn.Linear(16, 16)

    def mix(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) @ self.embed[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.mix(self.embed(x)))


class KeepsParameters(ReadsOthers):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.called.weight, self.embed[0].weight]

    def mix(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) @ self.kept[1]


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)]
        super().__init__(*layers)


class HalfHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.short = nn.Linear(16, 4), nn.Linear(4, 4, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.short(self.whole(x).bfloat16()).float()


class HalfApart(HalfHalf):
    @property
    def fsdp_units(self) -> list[nn.Module]:
        return [self.short]


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.double())))


def on_one_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight.data = model[0].weight.data
    return model


def views_of_one_storage() -> nn.Module:
    """Weights next to each other in one storage, not tied."""
    model, flat = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(2, 16, 16)
    model[0].weight.data, model[1].weight.data = flat
    return model


def odd(parameter: Tensor) -> nn.Module:
    module = nn.Linear(16, 16)
    module.register_parameter("odd", nn.Parameter(parameter))
    return module


def fsdp(precision: str = "fp32", min_params: int = MIN_PARAMS) -> Fsdp:
    settings = FsdpConfig(
        name="fsdp",
        shard_group="world",
        unit_min_params=min_params,
        reshard_after_forward=None,
        cpu_offload=False,
        param_dtype=None,
        reduce_dtype="fp32",
    )
    return plain_fsdp(settings, precision)


def plain_fsdp(settings: FsdpConfig, precision: str = "fp32") -> Fsdp:
    return Fsdp(settings, tiny.facts(), ComputeOptions(precision))


def gradients(build: Callable[[], nn.Module], strategy: Fsdp | None) -> dict[str, Tensor]:
    """Return the gradients of a model, and its output in evaluation."""
    torch.manual_seed(3)
    model = build()
    model = model if strategy is None else strategy.wrap(model)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    with strategy.autocast() if strategy is not None else nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        found = {"eval": model.eval()(x)}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, Tensor)
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return {name: value.detach() for name, value in found.items()}


def _models_train() -> dict[str, float]:
    """Return how far each model's gradients are from those of the plain module, and its units."""
    far = {}
    for build in (
        Tied,
        TwoParents,
        SharedPart,
        ParentsFirst,
        Attention,
        HalfApart,
        Convolutions,
        views_of_one_storage,
        Double,
    ):
        precision = "bf16" if build in (Convolutions, Double) else "fp32"
        ours, plain = gradients(build, fsdp(precision)), gradients(build, None)
        assert ours.keys() == plain.keys()
        assert all(ours[name].dtype == plain[name].dtype for name in plain), build
        far[build.__name__] = max((ours[name] - plain[name]).abs().max().item() for name in plain)
    return far


def _refusals() -> list[str]:
    messages = []
    for build in (
        lambda: odd(torch.ones(())),
        lambda: odd(torch.ones(0, 3)),
        lambda: odd(torch.ones(4, 3).t()),
        lambda: odd(torch.ones(3, dtype=torch.complex64)),
        HalfHalf,
        hooked,
        lambda: nn.Sequential(nn.Embedding(16, 16, sparse=True)),
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))),
        on_one_storage,
    ):
        with pytest.raises(UserError) as refusal:
            fsdp(min_params=10**6).wrap(build())
        messages.append(str(refusal.value))
    for build, strategy in (
        (ReadsOthers, fsdp()),
        (KeepsParameters, fsdp()),
        (Scaled, fsdp("bf16", min_params=10**6)),
    ):
        with pytest.raises((RuntimeError, UserError)) as refused:
            gradients(build, strategy)
        messages.append(str(strategy.explain(refused.value, "forward") or refused.value))
    return messages


class Scaled(nn.Module):
    """Multiplies by a buffer, which stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale)


def hooked() -> nn.Module:
    module = nn.Linear(16, 16)
    module.weight.register_hook(lambda grad: grad * 2)
    return module


def _notes_and_units() -> dict[str, list[str]]:
    found = {}
    for build in (Tied, TwoParents, SharedPart, ParentsFirst, Attention):
        strategy, model = fsdp(), build()
        names = {module: name for name, module in model.named_modules()}
        found[build.__name__] = [names[unit] for unit in strategy._units(model, [])] + strategy.notes
    return found


def _all() -> tuple[dict[str, float], dict[str, list[str]], list[str]]:
    return _models_train(), _notes_and_units(), _refusals()


@pytest.mark.slow
def test_units_of_any_model() -> None:
    far, units, messages = run_ranks(_all, 2)[0]
    assert 0 < far.pop("Convolutions") < 0.02 and far.pop("HalfApart") < 0.02  # computed in bf16
    assert far.pop("Double") < 1e-14 and max(far.values()) < 1e-6, far
    assert units["Tied"] == ["middle"]
    assert units["TwoParents"] == ["first.0"]
    assert units["SharedPart"] == []
    assert units["ParentsFirst"] == ["outer.1.0", "outer.1", "outer"]
    assert units["Attention"] == ["layer", "attention"]
    expected = [
        "odd: it does not support parameters without dim",
        "odd: it does not support parameters without elem",
        "odd: it does not support parameters in non-contiguous",
    ]
    expected += ["odd: it does not support parameters with complex values"]
    expected += ["torch.float32 in whole.weight and torch.bfloat16 in short.weight"]
    expected += ["cannot shard weight: it does not support parameters with a hook on the gradient"]
    expected += ["cannot shard 0.weight: it does not support parameters with a sparse gradient"]
    expected += ["cannot shard 0.weight, 0.bias: it does not support parameters of a torch.jit.script module"]
    expected += ["0.weight and 1.weight share memory, but "]
    expected += ["(return self.blocks[0](x) @ self.embed[0].weight) uses a parameter of a unit"]
    expected += ["uses embed.0.weight through a reference kept in a list"]
    expected += ["(return self.last(self.first(x) * self.scale)) mixes dtypes: "]
    for message, words in zip(messages, expected, strict=True):
        assert words in message


def test_tensors_that_would_stop_sharing_memory_are_refused() -> None:
    model, frozen, buffered = on_one_storage(), on_one_storage().requires_grad_(False), nn.Linear(2, 2)
    buffered.register_buffer("last", buffered.weight.data[1])
    for each in (model, buffered):
        with pytest.raises(UserError, match="would no longer be tied"):
            Strategy(torch.device("meta"), ComputeOptions())._place(each)
    for each in (frozen, views_of_one_storage()):
        Strategy(torch.device("meta"), ComputeOptions())._place(each)
    Strategy(torch.device("cpu"), ComputeOptions())._place(model)


def test_a_hosts_shard_group_contains_its_ranks_in_any_numbering() -> None:
    assert ranks_by_host([0, 0, 1, 1]) == [[0, 1], [2, 3]]
    assert ranks_by_host([0, 1, 0, 1]) == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match="the same number of ranks on each host, but the hosts have 3, 1"):
        ranks_by_host([0, 0, 0, 1])
