"""Who may import whom: data flows one way, and so do the imports."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Room to the rooms it may use besides itself; a room is a module or package right under trainer/ or models/.
LEAVES = {"errors", "new_directory", "seeding", "signals", "local_shard"}
MAY_USE = {
    **{room: set() for room in LEAVES},
    "overrides": set(),
    "comm": {"errors"},
    "ema": {"local_shard"},
    "pieces": {"local_shard"},
    "whole_file": {"errors"},
    "scalars": {"whole_file"},
    "state": {"ema", "optim"},
    "untrusted": {"errors"},
    "tasks": {"errors"},
    "config": {"errors", "overrides"},
    "launch": {"config", "errors", "overrides", "signals", "untrusted"},
    "sweep": {"config", "errors", "launch", "new_directory", "overrides", "scalars", "signals", "untrusted"}
    | {"whole_file"},
    "compare": {"errors", "overrides", "scalars", "sweep", "untrusted"},
    "build": {"errors"},
    "optim": {"build", "errors"},
    "groups": {"build", "config", "errors", "optim", "state"},
    "deferred": {"errors", "seeding"},
    "faults": {"config", "errors", "local_shard", "signals", "state", "whole_file", "untrusted"},
    "rendezvous": {"errors", "launch", "signals"},
    "interfaces": set(),
    "distributed": {"config", "errors", "faults", "interfaces", "launch", "rendezvous"},
    "data": {"errors", "faults"},
    "fingerprint": {"data", "faults", "pieces"},
    "label_weights": {"data", "errors", "tasks"},
    "gradients": {"distributed", "errors", "local_shard", "state"},
    "guard": {"distributed", "errors", "label_weights"},
    "flops": {"config", "data", "distributed", "errors", "seeding", "tasks"},
    "metrics": {"distributed", "flops", "label_weights", "tasks"},
    "learning": {"distributed", "local_shard", "state"},
    "profiling": {"config", "distributed", "errors", "metrics"},
    "loggers": {"build", "config", "distributed", "errors", "scalars", "terminal"},
    "terminal": {"distributed", "errors"},
    "replicas": {"distributed", "errors", "local_shard", "state"},
    "strategies": {"comm", "config", "deferred", "distributed", "errors", "optim", "state"}
    | {"label_weights", "step", "switches"},
    "switches": {"config"},
    "checkpoint": {
        "config",
        "distributed",
        "errors",
        "faults",
        "local_shard",
        "pieces",
        "seeding",
        "state",
        "untrusted",
    },
    "run_dir": {"checkpoint", "errors", "new_directory", "whole_file", "untrusted"},
    "parts": {"build", "checkpoint", "config", "data", "deferred", "distributed", "errors"}
    | {"strategies", "tasks"},
    "rows": {"distributed", "errors"},
    "evaluation": {"data", "distributed", "errors", "loggers", "rows", "seeding", "strategies", "tasks"},
    "job": {"checkpoint", "config", "data", "evaluation", "gradients", "guard", "learning", "loggers"}
    | {"metrics", "profiling", "replicas", "signals", "state"},
    "report": {"groups", "job", "metrics"},
    "step": {"label_weights"},
    "loop": {"errors", "evaluation", "job", "metrics", "optim", "report", "step"},
    "saved_settings": {"config", "errors", "overrides"},
    "after_training": {"config", "errors", "faults", "launch", "saved_settings"},
    "result": {"errors", "untrusted", "whole_file"},
    "row_file": {"errors"},
    "generation": set(),
    "trained": {"checkpoint", "config", "data", "deferred", "distributed", "errors", "evaluation"}
    | {"groups", "overrides", "parts", "run_dir", "seeding", "strategies"},
}
# These may use everything.
STORIES = {"run", "evaluate", "predict", "sample", "command", "library", "memory"}
FROM_OUTSIDE = {
    "config": {"omegaconf"},
    "overrides": {"hydra", "omegaconf"},
    "saved_settings": {"hydra", "omegaconf", "yaml"},
    "after_training": set(),
    "errors": set(),
    "comm": {"torch", "numpy", "matplotlib"},
    "models": {"torch", "torchvision"},
}


def imports_of(file: Path) -> Iterator[str]:
    """What `file` imports when it runs: what stands under `if TYPE_CHECKING:` is for annotations alone."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(room: str) -> list[Path]:
    package = ROOT / room if room == "models" else ROOT / "trainer" / room
    return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]


def rooms() -> set[str]:
    found = {
        path.stem
        for path in (ROOT / "trainer").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    return found - {"__init__", "__main__", *STORIES}


def test_every_room_is_on_the_plan() -> None:
    assert rooms() == set(MAY_USE), "stories may use everything; any other room needs a line in MAY_USE"


@pytest.mark.parametrize("room", sorted(MAY_USE))
def test_imports_run_one_way(room: str) -> None:
    allowed = MAY_USE[room] | {room}
    for file in files_of(room):
        used = {name.split(".")[1] for name in imports_of(file) if name.startswith("trainer.")}
        assert used <= allowed, f"{file.relative_to(ROOT)} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("room", sorted(FROM_OUTSIDE))
def test_rooms_that_need_little_take_little(room: str) -> None:
    for file in files_of(room):
        used = (
            {name.split(".")[0] for name in imports_of(file)}
            - {"trainer", "models"}
            - set(sys.stdlib_module_names)
        )
        assert used <= FROM_OUTSIDE[room], (
            f"{file.relative_to(ROOT)} imports {sorted(used - FROM_OUTSIDE[room])}"
        )


def test_no_strategy_imports_a_sibling() -> None:
    for file in (ROOT / "trainer" / "strategies").glob("*.py"):
        used = {name.split(".")[2] for name in imports_of(file) if name.startswith("trainer.strategies.")}
        kin = {"parameter_server"} if file.stem == "stale_parameter_server" else set()
        shared = {"base", "owned", "reads", "replica", "roles", "shardable", "split", "tally", "units"}
        assert file.stem == "__init__" or used <= shared | kin, file
