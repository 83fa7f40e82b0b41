"""Run the commands in the READMEs of examples/, most of them with fewer steps."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT, finish, torchrun

EXAMPLES = sorted(page.parent.name for page in (ROOT / "examples").glob("*/README.md"))
AT_LEAST = {  # of the metrics of whole runs, by example and run; negative: at most
    "recipes": {
        "gan": {"eval/mean_gap": -0.15},
        "distillation": {"eval/accuracy": 0.94},
        "byol": {"eval/neighbour_accuracy": 0.95},
        "contrastive": {"eval/neighbour_accuracy": 0.94},
        "segmentation": {"eval/miou": 0.7},
        "detection": {"eval/found": 0.75},
        "diffusion": {"eval/loss": -0.65},
        "lstm": {"eval/loss": -1.9},
        "codebook": {"eval/loss": -0.055},
        "lora": {"eval/perplexity": -62},
    }
}
SHORT = ("train.max_steps=2", "train.global_batch_size=8", "schedule.warmup_steps=0")


def commands(page: Path) -> Iterator[list[str]]:
    """Return the arguments of `python` for each command of the page, with fewer steps if possible."""
    cut = () if page.parent.name in AT_LEAST else SHORT
    for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S):
        for line in re.split(r"\n|&&", block):
            match shlex.split(line, comments=True):
                case [] | ["cd", _]:
                    pass
                case ["python", *words]:
                    yield words
                case ["ringmaster", *words]:
                    yield ["-m", "trainer", *words, *cut]
                case ["torchrun", "--standalone", ranks, "-m", "trainer", *words]:
                    yield [*torchrun(2, ranks), *words, *cut]
                case words:
                    raise AssertionError(words)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the recipes are a dozen whole runs
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_its_readme_says(example: str, tmp_path: Path) -> None:
    own_runs = shutil.ignore_patterns("runs", "round", "angular", "*.csv", "__pycache__")
    shutil.copytree(ROOT / "examples" / example, tmp_path / "examples" / example, ignore=own_runs)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for pictures in (tmp_path / "examples" / example).glob("shapes.py"):
        pictures.write_text(pictures.read_text().replace('"train": 100, "val": 25', '"train": 8, "val": 3'))
    for words in commands(ROOT / "examples" / example / "README.md"):
        done = finish(*words, cwd=tmp_path / "examples" / example)
        assert done.code == 0, f"{words}\n{done.output}"
    for run, bounds in AT_LEAST.get(example, {}).items():
        result = json.loads((tmp_path / "examples" / example / "runs" / run / "result.json").read_text())
        for metric, bound in bounds.items():
            assert result[metric] >= bound if bound > 0 else result[metric] <= -bound, (run, result[metric])


def test_each_example_is_listed() -> None:
    listed = re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == EXAMPLES
