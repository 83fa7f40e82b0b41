"""Under FSDP, an optimizer that does not update elementwise gets whole tensors, or is an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks import fsdp_optimizers as optimizers
from tests import runs
from tests.failures.test_ends import TINY
from tests.ranks import run_ranks
from trainer.loop import fit
from trainer.optim.shard_trial import ShardTrial, needs_of
from trainer.tensors.generators import generators_kept

OURS = "benchmarks.fsdp_optimizers."


class Noisy(torch.optim.SGD):
    """Adds noise to gradients: shards get different numbers than whole tensors, but updates are elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad += torch.randn_like(p)
        super().step()


class ByRows(torch.optim.SGD):
    """Has a number per row, which a checkpoint cannot distinguish from that of other rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.grad.reshape(len(p), -1).square().sum(1)
        super().step()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (torch.optim.AdamW, "SHARDS"),
        (Noisy, "SHARDS"),
        (ByRows, "WHOLE"),
        (optimizers.ByNorm, "WHOLE"),
        (torch.optim.Adafactor, "WHOLE"),
        (optimizers.ClipsAll, "NEITHER"),
        (optimizers.StepOfLBFGS, "NEITHER"),
        (torch.optim.SparseAdam, "NEITHER"),
    ],
)
def test_a_trial_step_finds_which_tensors_an_optimizer_needs(kind: Any, way: str) -> None:
    group = {"params": [torch.zeros(1, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1)]}
    trial = ShardTrial(lambda groups: kind(groups[0]["params"], lr=1e-5), [group])
    with generators_kept():
        found, why = needs_of(kind.__name__, trial)
    assert found.name == way and bool(why) == (way == "NEITHER"), why


CASES: list[tuple[str, dict[str, Any]]] = [
    *((OURS + name, {}) for name in ("ByNorm", "ShampooLike", "ClipsAll")),
    *((f"torch.optim.{name}", {}) for name in ("Adafactor", "Muon", "AdamW")),
]


def test_whole_tensors_and_saves_equal_one_process() -> None:
    alone = run_ranks(optimizers.train, 1, CASES, False)[0]
    for found in run_ranks(optimizers.train, 3, CASES, True):
        ways = {target.rpartition(".")[2]: way for (target, _), (way, *_) in zip(CASES, found, strict=True)}
        refused = ways.pop("ClipsAll")
        assert "ClipsAll computes the update of a parameter from other parameters, which" in refused
        assert ways == dict.fromkeys(ways, "whole") | {"AdamW": "shards"}
        for (target, _), (_, right, _), (way, end, resumed) in zip(CASES, alone, found, strict=True):
            if not way.startswith("refused"):
                assert optimizers.max_difference(end, right) < 1e-5, target
                assert optimizers.max_difference(resumed, end) == 0, target


def _continued(root: Path, strategy: str, chain: dict[str, tuple[str, int, str]]) -> dict[str, list[Tensor]]:
    """Return each optimizer's weights after a part of its run, from a checkpoint to a step with a save."""
    found = {}
    for target, (resume, until, name) in chain.items():
        chosen = ("optim=own", f"optim._target_={target}", "optim.lr=0.01", "schedule=constant")
        saves = (f"train.max_steps={until}", f"checkpoint.every_steps={until}", f"resume={resume}")
        place = f"run_dir={root / target / name}"
        with runs.context_of(*TINY, *chosen, *saves, f"strategy={strategy}", place) as context:
            fit(context)
            values = context.state.model.state_dict().values()
            found[target] = [(v.full_tensor() if isinstance(v, DTensor) else v).clone() for v in values]
    return found


@pytest.mark.slow
def test_saves_can_be_resumed_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    targets = (OURS + "ShampooLike", "torch.optim.Adafactor", "torch.optim.AdamW")
    root = tmp_path / "alone"
    alone = dict.fromkeys(targets, ("null", 8, "all"))
    right = run_ranks(_continued, 1, root, "single", alone, init=False)[0]
    resume, found = dict.fromkeys(targets, "null"), right
    for size, until in ((1, 2), (2, 4), (3, 6), (1, 8)):
        chain = {target: (resume[target], until, str(until)) for target in targets}
        strategy = "single" if size == 1 else "fsdp"
        found = run_ranks(_continued, size, tmp_path, strategy, chain, init=False)[0]
        saved = f"checkpoints/step_{until:08d}"
        resume = {target: str(tmp_path / target / str(until) / saved) for target in targets}
    for target in targets:
        assert optimizers.max_difference(found[target], right[target]) < 1e-5, target
