"""torch._dynamo is imported by what compiles, and by nothing else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.late_dynamo import import_dynamo_late

ROOT = Path(__file__).parents[1]
A_RUN_ALONE = """
import runpy, sys
sys.argv = ["train.py", "strategy=single", "train.max_steps=2", sys.argv[1]]
runpy.run_path("train.py", run_name="__main__")
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules])
"""


def test_a_run_of_one_process_imports_neither_the_compiler_nor_dtensors(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", A_RUN_ALONE, f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) + 1


class Own(torch.optim.Optimizer):
    @_use_grad_for_differentiable
    def step(self, result: str, *, closure: Any = None) -> tuple[str, Any, bool]:
        return result, closure, torch.is_grad_enabled()


import_dynamo_late(Mode, Own, torch.optim.Optimizer)
import_dynamo_late(Mode, Own, torch.optim.Optimizer)  # a second call changes nothing


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
def test_methods_do_the_same_before_that_import_and_after(
    is_imported: bool, differentiable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo

    graph_breaks: list[bool] = []
    monkeypatch.setattr(torch._dynamo, "graph_break", lambda: graph_breaks.append(True))
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    optimizer = Own([nn.Parameter(torch.ones(1))], {"differentiable": differentiable})
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert optimizer.step("result", closure=1) == ("result", 1, differentiable)
            assert torch.is_grad_enabled() == grad
    with Mode():
        assert torch.zeros(()) + 1 == 3
    assert bool(graph_breaks) == is_imported
    assert ("torch._dynamo" in sys.modules) == is_imported
