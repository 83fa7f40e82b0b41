"""The same seed and global batch give the same model under every strategy, on any number of ranks."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.runs import trained

COMMON = (
    "logger=jsonl",
    "train.max_steps=5",
    "train.global_batch_size=64",
    "train.eval_every_epochs=0",
    "schedule=constant",
)
MODELS = {
    "mlp": ("data=digits", "model=mlp", "model.hidden=[64,64]", "optim.lr=0.1"),
    "gpt": (
        "data=text",
        "model=gpt",
        "data.dataset.block_size=32",
        "model.width=32",
        "model.depth=2",
        "model.num_heads=2",
        "optim=sgd",
        "optim.lr=0.1",
    ),
}
STRATEGIES = {
    "ddp x2": (2, "strategy=ddp"),
    "fsdp x2": (2, "strategy=fsdp"),
    "fsdp hybrid 2x2": (4, "strategy=fsdp", "strategy.shard_group=host"),
}
HOSTS = {"fsdp hybrid 2x2": [0, 1, 0, 1]}  # as `mpirun --map-by node` numbers them


def options(run_dir: Path, model: str) -> tuple[str, ...]:
    return (*COMMON, *MODELS[model], f"run_dir={run_dir}", "checkpoint.every_epochs=null")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("single")
    runs = [(*options(root / name, name), "strategy=single") for name in MODELS]
    return dict(zip(MODELS, run_ranks(trained_each, 1, *runs, init=False)[0], strict=True))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest |a - b| / (atol + rtol |b|) for the tolerances of fp32 sums; at most 1."""
    assert one.keys() == other.keys()
    return max(((one[k] - other[k]).abs() / (1e-6 + 1e-4 * other[k].abs())).max().item() for k in one)


def trained_each(*runs: tuple[str, ...]) -> list[dict[str, Tensor]]:
    return [trained(*overrides) for overrides in runs]


def assert_all_equal_single(
    run_dir: Path,
    single: dict[str, dict[str, Tensor]],
    strategy: str,
    models: list[str],
    micros: list[int | None],
) -> None:
    """Start ranks once for all models and batches under a strategy."""
    world_size, *overrides = STRATEGIES[strategy]
    cases = [
        (model, micro)
        for model, micro in itertools.product(models, micros)
        if micro or world_size == 2 or model == "mlp"  # a GPT on four ranks takes long
    ]
    runs = [
        (
            *options(run_dir / f"{model}-{micro}", model),
            *overrides,
            f"train.micro_batch_size={micro or 'null'}",
        )
        for model, micro in cases
    ]
    ranks = run_ranks(trained_each, world_size, *runs, init=False, hosts=HOSTS.get(strategy))
    for (model, micro), *results in zip(cases, *ranks, strict=True):
        for rank, theirs in enumerate(results):
            for name, value in theirs.items():
                assert torch.equal(value, results[0][name]), (
                    f"{model}: rank {rank} differs from rank 0 in {name}"
                )
        print(f"{model} {strategy} {micro=}: {distance(results[0], single[model]):.3f} of the tolerance")
        assert distance(results[0], single[model]) < 1, f"{model} {micro=}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_single(tmp_path: Path, single: dict[str, dict[str, Tensor]], strategy: str) -> None:
    assert_all_equal_single(tmp_path, single, strategy, list(MODELS), [None, 8])
