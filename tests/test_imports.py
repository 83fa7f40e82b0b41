"""Check which part of trainer/ imports which: imports go only from higher to lower layers."""

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainer"

# The parts of trainer/ (its folders, and the files next to them), in layers from bottom to top, each with the
# parts that it may use, all of which are in lower layers.
LAYERS: tuple[dict[str, str], ...] = (
    {
        "accelerator": "",
        "errors": "",
    },
    {
        "config": "errors",
        "files": "errors",
        "tensors": "accelerator",
    },
    {
        "model": "config errors tensors",
        "troubleshooting": "config",
    },
    {
        "failures": "errors files troubleshooting",
        "launch": "config errors files troubleshooting",
        "optim": "accelerator config errors model tensors",
    },
    {
        "data": "accelerator config errors failures launch tensors",
        "distributed": "accelerator config errors failures files launch tensors",
        "state": "config errors model optim tensors",
    },
    {
        "checkpoint": "accelerator config distributed errors failures files model optim state tensors",
        "exact": "accelerator distributed errors files launch model optim tensors",
        "tasks": "accelerator data errors tensors",
    },
    {
        "comm": "accelerator config distributed errors exact launch",
        "run_dir": "checkpoint distributed errors failures files",
    },
    {
        "loggers": "config distributed errors run_dir",
        "step_vote": "accelerator comm data distributed errors exact",
        "strategies": "accelerator comm config distributed errors exact model optim state tensors",
        "sweep": "config errors files launch run_dir",
    },
    {
        "build": "checkpoint config data distributed errors model optim strategies tasks",
        "compare": "config errors files sweep",
        "status": "checkpoint errors failures files run_dir sweep",
        "evaluation": "accelerator data distributed errors loggers strategies tasks tensors",
        "forward_backward": "strategies tasks",
    },
    {
        "guards": "accelerator checkpoint config data distributed errors exact failures forward_backward model "
        "optim state strategies tasks tensors",
        "inference": "build checkpoint config data distributed errors evaluation files launch run_dir "
        "strategies tasks tensors",
        "micro_batch": "accelerator build config data distributed errors forward_backward model optim strategies "
        "tasks tensors",
        "report": "accelerator config data distributed errors exact failures forward_backward model run_dir "
        "state strategies tasks tensors",
    },
    {
        "context": "checkpoint config data distributed evaluation guards launch loggers report state "
        "step_vote strategies tasks",
        "evaluate": "config distributed evaluation files inference",
        "predict": "config errors evaluation files inference launch tasks",
        "sample": "config errors inference",
    },
    {
        "log_step": "accelerator context",
        "non_finite": "context distributed errors",
        "start_table": "config context distributed optim run_dir",
        "task_hooks": "context distributed errors model tasks tensors",
    },
    {
        "dry_run": "config context data distributed errors evaluation forward_backward model optim "
        "strategies task_hooks tasks tensors",
        "update": "accelerator context errors non_finite state task_hooks tensors",
    },
    {
        "assemble": "build checkpoint comm config context data distributed dry_run errors exact failures guards "
        "launch loggers model optim report state step_vote strategies tasks tensors",
        "step": "context data dry_run forward_backward state step_vote task_hooks tasks tensors update",
    },
    {
        "loop": "accelerator context data dry_run errors evaluation log_step state step step_vote task_hooks",
    },
    {
        "run": "assemble checkpoint config context data distributed errors exact files launch loop micro_batch "
        "report run_dir start_table troubleshooting",
    },
    {
        "replay": "accelerator assemble checkpoint config context data distributed dry_run errors exact files inference "
        "launch loop model report run run_dir task_hooks tasks tensors",
        "cli": "config errors launch run",
    },
    {
        "api": "cli config errors files inference launch run",
        "exact/verify": "build cli config distributed errors exact guards launch strategies tasks",
        "diff": "checkpoint config context data distributed errors files inference launch model replay report run_dir sweep "
        "tensors",
    },
)
COMMANDS = {PACKAGE / f"{part}.py" for layer in LAYERS for part in layer if "/" in part}
"""Programs in a higher layer than their folder, because no module imports them."""
EVERYWHERE = {"torch_private"}  # imports no other part
MAY_USE = {part: set(used.split()) for layer in LAYERS for part, used in layer.items()}
# The only third-party packages that these parts may import.
FROM_OUTSIDE = {
    "config": {"hydra", "omegaconf", "yaml"},
    "errors": set(),
    "files": {"fsspec"},
    "comm": {"torch", "numpy", "matplotlib"},
    "models": {"torch", "torchvision"},
}
# These must not import torch when they are imported, only where they use it.
WITHOUT_TORCH = [
    *(
        "config",
        "launch",
        "sweep",
        "files",
        "cli.py",
        "status.py",
        "run_dir/__init__.py",
        "run_dir/metrics_file.py",
    ),
    *("inference/__init__.py", "inference/command.py"),
]


@functools.cache
def statements(file: Path) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements of `file` that run when it is imported, and all its imports and classes."""
    top = ast.parse(file.read_text()).body
    inner, left = list[ast.stmt](), list[ast.AST](top)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            inner.append(node)
        left += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return top, inner


@functools.cache
def imports_of(file: Path, *, at_once: bool = False) -> tuple[str, ...]:
    """Return the names that `file` imports; with `at_once`, only those when it is imported itself."""
    return tuple(_imports(file, at_once))


def _imports(file: Path, at_once: bool) -> Iterator[str]:
    for node in statements(file)[0 if at_once else 1]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(part: str) -> list[Path]:
    at = ROOT / part if part == "models" else PACKAGE / part
    return sorted(set(at.rglob("*.py")) - COMMANDS) if at.is_dir() else [at.with_suffix(".py")]


def parts_in(folder: Path) -> dict[str, list[Path]]:
    """Return the folders and files directly in `folder`, by name, with all files in each."""
    found = {path.stem: [path] for path in folder.glob("*.py") if not path.stem.startswith("__")}
    inner = (path.parent for path in folder.glob("*/__init__.py"))
    return found | {path.name: sorted(set(path.rglob("*.py")) - COMMANDS) for path in inner}


def file_of(name: str) -> Path | None:
    """Return the file of the longest prefix of a dotted name that is a module of trainer."""
    while name.startswith("trainer"):
        at = ROOT / name.replace(".", "/")
        for path in (at.with_suffix(".py"), at / "__init__.py"):
            if path.exists():
                return path
        name = name.rpartition(".")[0]
    return None


def test_every_folder_has_a_layer() -> None:
    parts = {part for part in MAY_USE if "/" not in part}
    assert set(parts_in(PACKAGE)) == parts | EVERYWHERE, "add each part of trainer/ to LAYERS"


def test_no_layer_uses_a_higher_one() -> None:
    below: set[str] = set()
    for layer in LAYERS:
        for part, used in layer.items():
            assert set(used.split()) <= below, f"{part} may use {used}, which must be in lower layers"
        below |= layer.keys()


@pytest.mark.parametrize("part", sorted(MAY_USE))
def test_imports_follow_the_layers(part: str) -> None:
    allowed = MAY_USE[part] | {part} | EVERYWHERE
    for file in files_of(part):
        used = {name.split(".")[1] for name in imports_of(file) if name.startswith("trainer.")}
        assert used <= allowed, f"{file.relative_to(ROOT)} imports {sorted(used - allowed)}"


def test_trainer_runs_without_the_planner() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] == "planner" for name in imports_of(file)), file


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in PACKAGE.rglob("__init__.py")), ids=lambda p: p.name
)
def test_no_import_cycle_within_a_folder(folder: Path) -> None:
    """Also between its folders and the files next to them; graphlib raises CycleError."""
    parts = parts_in(folder)
    home = {file: name for name, files in parts.items() for file in files}
    uses = {
        name: {home[at] for file in files for used in imports_of(file) if (at := file_of(used)) in home}
        - {name}
        for name, files in parts.items()
    }
    list(TopologicalSorter(uses).static_order())


@pytest.mark.parametrize("part", sorted(FROM_OUTSIDE))
def test_folders_import_only_allowed_packages(part: str) -> None:
    for file in files_of(part):
        used = (
            {name.split(".")[0] for name in imports_of(file)}
            - {"trainer", "models"}
            - set(sys.stdlib_module_names)
        )
        assert used <= FROM_OUTSIDE[part], (
            f"{file.relative_to(ROOT)} imports {sorted(used - FROM_OUTSIDE[part])}"
        )


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_modules_used_before_torch_do_not_import_it(part: str) -> None:
    at = PACKAGE / part
    seen, left = set[Path](), sorted(at.rglob("*.py")) if at.is_dir() else [at]
    while left:
        file = left.pop()
        seen.add(file)
        for name in imports_of(file, at_once=True):
            assert name.split(".")[0] not in ("torch", "torchvision"), f"{part}: {file} imports {name}"
            found = file_of(name)
            around = [] if found is None else [found, *(up / "__init__.py" for up in found.parents)]
            left += [path for path in around if path.is_relative_to(PACKAGE) and path not in seen]
        left = [path for path in left if path.exists()]


def test_the_core_stays_small() -> None:
    core = ("cli", "run", "loop", "step", "update", "forward_backward", "context", "strategies/base")
    lines = {name: len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in core}
    assert sum(lines.values()) <= 1400, lines
    assert lines["step"] <= 120
    for name, most in (("run", 40), ("loop", 15), ("step", 15), ("update", 10)):
        used = {file_of(of) for of in imports_of(PACKAGE / f"{name}.py")} - {None}
        assert len(used) <= most, f"{name}.py imports {len(used)} modules"


def test_no_strategy_imports_another_strategy() -> None:
    shared = {"base", "ddp_comm", "meta_init", "placement", "sharding", "units"}
    for file in sorted((PACKAGE / "strategies").rglob("*.py")):
        used = {name.split(".")[2] for name in imports_of(file) if name.startswith("trainer.strategies.")}
        assert file.name == "build.py" or used <= shared, file


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in statements(file)[1]
        if isinstance(node, ast.ClassDef)
    )
    assert not (twice := [name for name, count in names.items() if count > 1]), twice
