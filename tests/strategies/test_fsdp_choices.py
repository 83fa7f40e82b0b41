"""The settings of FSDP and activation checkpointing change memory and traffic, but not the gradients."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from models.gpt import GPT
from tests.checkpoint import tiny
from tests.ranks import run_ranks
from tests.runs import TORCH_2_14
from tests.strategies.test_fsdp import plain_fsdp
from trainer.config import FsdpConfig, UnitsConfig
from trainer.errors import UserError
from trainer.model.trainable_parameters import TrainableParameters
from trainer.strategies.base import ComputeOptions
from trainer.strategies.fsdp import Fsdp
from trainer.strategies.units import checkpoint_activations, named_units

# By name: settings, and whether they change the order of sums.
CHOICES: dict[str, tuple[dict[str, Any], bool]] = {
    "all freed": ({"reshard_after_forward": True}, False),
    "none freed": ({"reshard_after_forward": False}, False),
    "sharded sums": ({"reduce_every_micro_batch": True}, True),
    "hybrid": ({"shard_group": "2"}, True),
    "hybrid, sharded sums": ({"shard_group": "2", "reduce_every_micro_batch": True}, True),
    "computed again": ({"activation_checkpointing": True}, False),
    "products kept": (
        {"activation_checkpointing": True, "activation_checkpointing_keep": ["matmul", "attention"]},
        False,
    ),
}

# Gathers in two micro-batches: four units before the forward pass; three, all or none before the backward.
# An older torch cannot count them in a checkpointed model.
GATHERS = {"default": 14, "all freed": 16, "none freed": 8} if TORCH_2_14 else {}


def _model() -> nn.Module:
    torch.manual_seed(3)
    return GPT(vocab_size=11, block_size=6, width=8, depth=3, num_heads=2)


def _config(**settings: Any) -> FsdpConfig:
    defaults = {"name": "fsdp", "shard_group": "world", "reshard_after_forward": None}
    defaults |= {"cpu_offload": False, "param_dtype": None, "reduce_dtype": "fp32"}
    return FsdpConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def _accumulated(
    settings: dict[str, Any] | None, rank: int, counts_gathers: bool = False
) -> tuple[dict[str, Tensor], Tensor, int, int]:
    """Return the unsharded gradients of two micro-batches, their norm with its messages, and the gathers."""
    model = _model()
    strategy = None
    if settings is not None:
        config = _config(**settings)
        if config.activation_checkpointing:
            checkpoint_activations(model, config)
        strategy = plain_fsdp(config)
        model = strategy.wrap(model)
    draw = torch.Generator().manual_seed(rank)
    traffic = CommDebugMode()  # intercepts each operation of the model, which is slow
    with traffic if counts_gathers else nullcontext():
        for micro in range(2):
            tokens = torch.randint(11, (2, 6), generator=draw)
            with strategy.gradient_sync(model, enabled=micro == 1) if strategy else nullcontext():
                model(tokens).square().mean().backward()
    gathers = traffic.get_comm_counts()[torch.ops.c10d._allgather_base_] if counts_gathers else 0
    with CommDebugMode() as messages:
        if strategy is None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        else:
            trained = TrainableParameters(model)
            trained.attach_gradients()
            norm = strategy.grad_norm(trained)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if strategy else grad for name, grad in found.items()}  # type: ignore
    return whole, norm, messages.get_total_counts(), gathers


def _differences() -> dict[str, tuple[float, float, int, int]]:
    """Return, for each choice, errors of gradients and norm, the messages of the norm, and the gathers."""
    world = torch.distributed.get_world_size()
    own = [_accumulated(None, rank)[0] for rank in range(world)]
    plain = {name: sum(each[name] for each in own) / world for name in own[0]}
    default = _accumulated({}, tiny.facts().rank)[0]
    found = {}
    for name, (settings, other_order) in {"default": ({}, True), **CHOICES}.items():
        ours, norm, messages, gathers = _accumulated(settings, tiny.facts().rank, name in GATHERS)
        reference = plain if other_order else default
        far = max(float((ours[key] - value).abs().max()) for key, value in reference.items())
        true_norm = torch.stack([value.norm() for value in plain.values()]).norm()
        found[name] = (far, abs(float(norm / true_norm) - 1), messages, gathers)
    return found


class Reversed(nn.Module):
    """Registers its units in a different order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.fsdp_units = [self.c, self.b, self.a]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@torch.no_grad()
def _with_other_weights() -> float:
    """Return the error of a model whose weights change between two passes without gradients."""
    torch.manual_seed(3)
    model = Reversed()
    plain, strategy = copy.deepcopy(model), plain_fsdp(_config())
    model = strategy.wrap(model)
    strategy.weights_changed(model)  # also before any pass
    model(torch.ones(1, 4))
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.mul_(2)
    strategy.weights_changed(model)
    return float((model(torch.ones(1, 4)) - plain(torch.ones(1, 4))).abs().max())


def _calls_of_compile() -> Counter[str]:
    """Return the modules that train.compile compiles, and the error of a setting that needs a newer torch."""
    compiled = Counter[str]()
    torch.compile = lambda forward, mode: compiled.update([type(forward.__self__).__name__]) or forward  # type: ignore
    Fsdp(_config(), tiny.facts(), ComputeOptions(compile=True)).wrap(_model())
    if TORCH_2_14:
        del FSDPModule.set_reduce_scatter_unused_params
    with pytest.raises(UserError, match=r"find_unused_parameters=true under fsdp needs torch>=2\.14"):
        plain_fsdp(_config(find_unused_parameters=True))
    mixed = plain_fsdp(_config(param_dtype="bf16", reduce_dtype="fp16"))._precision(nn.Linear(1, 1))
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float16)
    return compiled


def _all() -> tuple[dict[str, tuple[float, float, int, int]], float, Counter[str]]:
    return _differences(), _with_other_weights(), _calls_of_compile()


@pytest.mark.slow
def test_every_choice_gives_the_same_gradients_as_the_plain_model() -> None:
    differences, off, compiled = run_ranks(_all, 4)[0]
    assert compiled == {"Block": 3}, "each unit is compiled"
    assert off < 1e-6, "a unit that was gathered ahead, and not called, keeps the weights of then"
    assert {name: differences[name][3] for name in GATHERS} == GATHERS
    for name, (far, norm_far, messages, _) in differences.items():
        exact = name in CHOICES and not CHOICES[name][1]
        assert far == 0 if exact else far < 1e-6, f"{name}: {far}"
        assert norm_far < 1e-5 and messages == 1, f"{name}: the norm takes {messages} messages"


def test_activation_checkpointing_keep_accepts_only_operations() -> None:
    chosen = UnitsConfig("x", 1, True, 1, ["attention", "matmull"])
    with pytest.raises(UserError, match="unknown operation matmull; use matmul"):
        checkpoint_activations(_model(), chosen)


@pytest.mark.parametrize(("every", "keep", "products"), [(1, [], 6), (2, [], 5), (1, ["matmul"], 3)])
def test_recomputed_activations_do_not_count_twice(every: int, keep: list[str], products: int) -> None:
    """Recompute all of three units, or every second one, or all operations apart from matrix products."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()),
        )
        if again:
            checkpoint_activations(model, UnitsConfig("x", 28, True, every, keep))
        outputs: list[Tensor] = []
        for unit in model:
            unit[0].register_forward_hook(lambda *called, to=outputs: to.append(called[2]))
        for _ in range(2):
            model(torch.randn(8, 4)).square().sum().backward()
        assert len({output.data_ptr() for output in outputs}) == 2 * (products if again else 3)
        found.append([*model.buffers(), *(parameter.grad for parameter in model.parameters())])
    for without, with_ in zip(*found, strict=True):
        assert torch.equal(without, with_)


class Names(nn.Module):
    def __init__(self, name: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.block, self.several, self.name = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), name

    @property
    def fsdp_units(self) -> Any:
        return self.name(self)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            lambda model: ["block"],
            "contains 'block', which is not a submodule; list the modules themselves",
        ),
        (lambda model: [nn.Linear(2, 2)], "contains Linear, which is not a submodule"),
        (lambda model: [model.several], "contains several, a ModuleList, which is never called"),
        (lambda model: model.block, "is Linear; it must be a list of submodules"),
    ],
)
def test_fsdp_units_of_a_model_must_be_submodules(name: Callable[[nn.Module], Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"fsdp_units of Names {words}")):
        checkpoint_activations(Names(name), UnitsConfig(activation_checkpointing=True))


def test_fsdp_units_are_unique_and_their_errors_are_raised() -> None:
    shared = Names(lambda model: [model.block, model.block])
    assert named_units(shared) == [shared.block]
    assert named_units(nn.Linear(2, 2)) == named_units(Names(lambda model: None)) == []
    with pytest.raises(AttributeError, match="blok"):
        named_units(Names(lambda model: [model.blok]))
