"""The examples in CONTRIBUTING.md work, and versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.comm.proof import simulate
from tests.ranks import run_ranks
from tests.runs import trained
from trainer.comm.algorithms import all_reduce

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(?:python|yaml)\n# (?:in )?(\S+)\n(.*?)^```$", re.M | re.S)
EXAMPLES = {match[1]: match[2] for match in _BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text())}


def names(example: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the names that the example defines."""
    found = dict(known or {"__name__": "example"})
    exec(compile(EXAMPLES[example], example, "exec"), found)
    return found


def test_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == project
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project


def test_github_and_citation_files_are_valid_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) == 6 and all(yaml.safe_load(file.read_text()) for file in files)


def test_the_recipe_for_an_all_reduce() -> None:
    left_ring = names("trainer/comm/algorithms/all_reduce.py", vars(all_reduce))["left_ring"]
    for hosts in ([0], [0, 0], [0, 0, 1, 1], [1, 0, 2, 0, 1]):
        simulate([left_ring(rank, hosts) for rank in range(len(hosts))])


def trained_plainly(*overrides: str) -> dict[str, torch.Tensor]:
    plain = names("trainer/strategies/plain.py")["Plain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.assemble.build_strategy", lambda config, ranks: plain(ranks, _computing()))
        return trained(*overrides)


def _computing() -> Any:
    from trainer.strategies.base import ComputeOptions

    return ComputeOptions()


@pytest.mark.slow
def test_the_recipe_for_a_strategy(tmp_path: Path) -> None:
    few = ("train.max_steps=5", "model.hidden=[16]", "checkpoint.every_epochs=null", "logger=jsonl")
    plain = run_ranks(trained_plainly, 2, *few, f"run_dir={tmp_path}/plain", init=False)
    ddp = run_ranks(trained, 2, *few, f"run_dir={tmp_path}/ddp", init=False)[0]
    for mine in plain:
        for name, value in ddp.items():
            torch.testing.assert_close(mine[name], value)
