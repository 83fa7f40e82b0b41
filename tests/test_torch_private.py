"""torch's private names are in one file and checked at start, and a missing one is reported."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import torch_private
from trainer.torch_private import skipped_on_device, skips_on_device

ROOT = Path(__file__).parents[1]
FILES = [file for folder in ("trainer", "planner") for file in sorted((ROOT / folder).rglob("*.py"))]


def private_uses(file: Path) -> set[str]:
    """Return torch's private modules and attributes that are imported or used by a dotted name."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node).partition("(")[0]
            of_torch = text.split(".")[0] in ("torch", "dist", "nn")
            names = [text] if of_torch else []
            if node.attr in ("_version", "_buffers", "_parameters", "_metadata", "_last_lr", "_worker_info"):
                names += [text] if not text.startswith("self.") else []
        else:
            continue
        found |= {name for name in names if any(re.match("_[^_]", part) for part in name.split("."))}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_are_in_one_file(file: Path) -> None:
    assert file.name == "torch_private.py" or not private_uses(file)


def test_this_torch_has_all_private_names() -> None:
    assert torch_private.missing() == []


def test_a_missing_private_name_is_reported_at_start() -> None:
    code = "import torch; del torch.nn.Module._version; import trainer.torch_private"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and "lacks torch.nn.Module._version, " in done.stderr


class Decaying(torch.optim.SGD):
    pass


def test_only_torchs_fused_optimizers_skip_on_the_device() -> None:
    own = nn.Parameter(torch.ones(2))
    own.grad = torch.full((2,), torch.nan)
    fused = torch.optim.AdamW([own], fused=True)
    assert skips_on_device(fused)
    assert not skips_on_device(torch.optim.AdamW([own], fused=False))
    assert not skips_on_device(Decaying([own], lr=0.1, fused=True))
    with skipped_on_device(fused, torch.ones(())):
        fused.step()
    assert own.tolist() == [1, 1]
