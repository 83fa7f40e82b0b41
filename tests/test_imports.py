"""Which room may import which: data flows one way, and so do the imports."""

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "trainer"

# The rooms of trainer/ (its folders, and the files beside them), floor by floor from the ground up, each with
# the rooms that it may use; all of them are on lower floors.
FLOORS: tuple[dict[str, str], ...] = (
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
        "exact/verify": "build cli config distributed exact guards launch strategies tasks",
        "diff": "checkpoint config context data distributed errors files inference launch model replay report run_dir sweep "
        "tensors",
    },
)
COMMANDS = {HOUSE / f"{room}.py" for floor in FLOORS for room in floor if "/" in room}
"""Programs that stand above the room of their folder, because nothing imports them."""
EVERYWHERE = {"torch_private"}  # uses none itself
MAY_USE = {room: set(used.split()) for floor in FLOORS for room, used in floor.items()}
# Nothing else from outside the standard library: these are loaded before it is known whether torch is wanted.
FROM_OUTSIDE = {
    "config": {"hydra", "omegaconf", "yaml"},
    "errors": set(),
    "files": {"fsspec"},
    "comm": {"torch", "numpy", "matplotlib"},
    "models": {"torch", "torchvision"},
}
# These must not load torch by their imports; they import it where they use it.
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
    """Imports and classes of `file` that are made when it is loaded, and all, those for annotations among them."""
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
    """The imports of `file` when it runs or, `at_once`, when it is loaded."""
    return tuple(_imports(file, at_once))


def _imports(file: Path, at_once: bool) -> Iterator[str]:
    for node in statements(file)[0 if at_once else 1]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(room: str) -> list[Path]:
    at = ROOT / room if room == "models" else HOUSE / room
    return sorted(set(at.rglob("*.py")) - COMMANDS) if at.is_dir() else [at.with_suffix(".py")]


def rooms_in(folder: Path) -> dict[str, list[Path]]:
    """Folders and files right under `folder`, by name, with all files in each."""
    found = {path.stem: [path] for path in folder.glob("*.py") if not path.stem.startswith("__")}
    inner = (path.parent for path in folder.glob("*/__init__.py"))
    return found | {path.name: sorted(set(path.rglob("*.py")) - COMMANDS) for path in inner}


def file_of(name: str) -> Path | None:
    """The file of the longest part of a dotted name that is a module of trainer."""
    while name.startswith("trainer"):
        at = ROOT / name.replace(".", "/")
        for path in (at.with_suffix(".py"), at / "__init__.py"):
            if path.exists():
                return path
        name = name.rpartition(".")[0]
    return None


def test_every_folder_has_a_layer() -> None:
    rooms = {room for room in MAY_USE if "/" not in room}
    assert set(rooms_in(HOUSE)) == rooms | EVERYWHERE, "a room of trainer/ needs its line in FLOORS"


def test_no_layer_uses_a_higher_one() -> None:
    below: set[str] = set()
    for floor in FLOORS:
        for room, used in floor.items():
            assert set(used.split()) <= below, f"{room} may use {used}, but some of it is not below it"
        below |= floor.keys()


@pytest.mark.parametrize("room", sorted(MAY_USE))
def test_imports_follow_the_layers(room: str) -> None:
    allowed = MAY_USE[room] | {room} | EVERYWHERE
    for file in files_of(room):
        used = {name.split(".")[1] for name in imports_of(file) if name.startswith("trainer.")}
        assert used <= allowed, f"{file.relative_to(ROOT)} imports {sorted(used - allowed)}"


def test_trainer_runs_without_the_planner() -> None:
    for file in HOUSE.rglob("*.py"):
        assert not any(name.split(".")[0] == "planner" for name in imports_of(file)), file


@pytest.mark.parametrize("folder", sorted(p.parent for p in HOUSE.rglob("__init__.py")), ids=lambda p: p.name)
def test_no_import_cycle_within_a_folder(folder: Path) -> None:
    """Also between its folders and the files beside them; graphlib raises CycleError."""
    rooms = rooms_in(folder)
    home = {file: name for name, files in rooms.items() for file in files}
    uses = {
        name: {home[at] for file in files for used in imports_of(file) if (at := file_of(used)) in home}
        - {name}
        for name, files in rooms.items()
    }
    list(TopologicalSorter(uses).static_order())


@pytest.mark.parametrize("room", sorted(FROM_OUTSIDE))
def test_folders_import_only_allowed_packages(room: str) -> None:
    for file in files_of(room):
        used = (
            {name.split(".")[0] for name in imports_of(file)}
            - {"trainer", "models"}
            - set(sys.stdlib_module_names)
        )
        assert used <= FROM_OUTSIDE[room], (
            f"{file.relative_to(ROOT)} imports {sorted(used - FROM_OUTSIDE[room])}"
        )


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_modules_used_before_torch_do_not_import_it(room: str) -> None:
    at = HOUSE / room
    seen, left = set[Path](), sorted(at.rglob("*.py")) if at.is_dir() else [at]
    while left:
        file = left.pop()
        seen.add(file)
        for name in imports_of(file, at_once=True):
            assert name.split(".")[0] not in ("torch", "torchvision"), f"{room}: {file} imports {name}"
            found = file_of(name)
            around = [] if found is None else [found, *(up / "__init__.py" for up in found.parents)]
            left += [path for path in around if path.is_relative_to(HOUSE) and path not in seen]
        left = [path for path in left if path.exists()]


def test_the_core_stays_small() -> None:
    story = ("cli", "run", "loop", "step", "update", "forward_backward", "context", "strategies/base")
    lines = {name: len((HOUSE / f"{name}.py").read_text().splitlines()) for name in story}
    assert sum(lines.values()) <= 1400, lines
    assert lines["step"] <= 120
    for name, most in (("run", 40), ("loop", 15), ("step", 15), ("update", 10)):
        used = {file_of(of) for of in imports_of(HOUSE / f"{name}.py")} - {None}
        assert len(used) <= most, f"{name}.py imports {len(used)} modules"


def test_no_strategy_imports_another_strategy() -> None:
    shared = {"base", "ddp_comm", "meta_init", "placement", "sharding", "units"}
    for file in sorted((HOUSE / "strategies").rglob("*.py")):
        used = {name.split(".")[2] for name in imports_of(file) if name.startswith("trainer.strategies.")}
        assert file.name == "build.py" or used <= shared, file


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for file in HOUSE.rglob("*.py")
        for node in statements(file)[1]
        if isinstance(node, ast.ClassDef)
    )
    assert not (twice := [name for name, count in names.items() if count > 1]), twice
