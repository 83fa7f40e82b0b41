"""torch._dynamo is imported by what compiles, and by nothing else."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.late_dynamo import _Unimported, default_ddp_mode, import_dynamo_late

ROOT = Path(__file__).parents[1]
A_RUN = """
import runpy, sys
sys.argv = ["train.py", "train.max_steps=2", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
heavy = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
sys.stdout.write(f"{[name for name in heavy if name in sys.modules]}\\n")
"""
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python", sys.executable)


@pytest.mark.parametrize(("strategy", "launcher"), [("single", ()), ("ddp", RANKS)])
def test_a_run_imports_neither_the_compiler_nor_dtensors(
    strategy: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, *launcher, "-c", A_RUN, f"strategy={strategy}", f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines().count("[]") == (2 if launcher else 1), run.stdout


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) + 1


class Own(torch.optim.Optimizer):
    @_use_grad_for_differentiable
    def step(self, result: str, *, closure: Any = None) -> tuple[str, Any, bool]:
        return result, closure, torch.is_grad_enabled()


class Wrapper(DistributedDataParallel):
    @contextmanager
    @torch._disable_dynamo(recursive=False)
    def inside(self, result: str) -> Iterator[str]:
        yield result


import_dynamo_late(Mode, Own, torch.optim.Optimizer, Wrapper)
import_dynamo_late(Mode, Own, torch.optim.Optimizer, Wrapper)  # a second call changes nothing


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
        value = torch.zeros(()) + 1
    assert value == 3
    with Wrapper.__new__(Wrapper).inside("result") as result:
        assert result == "result"
    assert bool(graph_breaks) == is_imported
    assert ("torch._dynamo" in sys.modules) == is_imported


@pytest.mark.parametrize("is_imported", [False, True])
def test_the_constructor_of_ddp_gets_the_mode_that_the_compiler_has(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo

    compiler = torch._dynamo
    assert compiler.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    monkeypatch.setattr(torch, "_dynamo", compiler)  # put back at the end
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    with default_ddp_mode():
        assert (torch._dynamo is compiler) == is_imported
        assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    assert ("_dynamo" in vars(torch)) == is_imported
    stands = _Unimported("math", pi=3)  # what it has no answer to, the module has
    assert (stands.pi, stands.tau) == (3, math.tau)
