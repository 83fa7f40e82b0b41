"""Write docs/reference/settings.md from the files in conf/ and their comments.

python docs/generate_settings.py
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import get_object

from trainer.config.schema import COMMS, LAUNCHES, STRATEGIES, Config
from trainer.sweep.search import SweepConfig

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
PAGE = ROOT / "docs" / "reference" / "settings.md"
GROUPS = [
    "strategy",
    "comm",
    "data",
    "model",
    "optim",
    "schedule",
    "checkpoint",
    "logger",
    "launch",
    "hydra/sweeper",
]
CHOICES: dict[str, Mapping[str, type]] = {"strategy": STRATEGIES, "comm": COMMS, "launch": LAUNCHES}
OWN_PACKAGES = ("trainer.", "models.")
# Types that cannot be found from the schema or the default.
TYPES = {
    "model.init_from": "str or null",
    "model.init_key": "str or null",
    "model.init_ignore": "list of str",
    "model.adapters": "mapping or null",
    "model.freeze": "list of str",
    "model.config.vocab_size": "int or auto",
    "model.config.bos_token_id": "int or null",
    "model.config.eos_token_id": "int or null",
    "data.dataset.data_files": "mapping or null",
    "optim.lr": "float",
    "optim.betas": "list of float",
    "optim.no_decay": "mapping or null",
    "optim.groups": "list of mapping",
}
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w/]+):(?: +(?P<value>[^#\s].*?))?(?: +# ?(?P<comment>.*))?$")
_INTRO = """# Settings

Every setting can be changed on the command line: `python train.py train.epochs=5 optim.lr=0.1`.
`python train.py --cfg job ...` prints all settings that a command would use, without training.

The first part lists the settings that every run has. The other parts list the choices of each configuration
group; select one choice per group, such as `strategy=fsdp`.

The key `_target_` is the import path of a class or function, and the keys next to it are its arguments. To
pass an argument that is not listed, use `+KEY=VALUE`.

This page is generated from `conf/` by `python docs/generate_settings.py`.
"""
_HEADER = ["| Setting | Type | Default | Description |", "|---|---|---|---|"]


def page() -> str:
    """Return the page."""
    parts = [_INTRO, "## Every run\n", "`conf/train.yaml`.\n", entries(CONF / "train.yaml")]
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            parts += [f"## `{group}={file.stem}`\n", head(file), entries(file, f"{group.replace('/', '.')}.")]
    parts += [
        "## Experiments\n",
        "An experiment selects one choice per group and changes settings to match.\n",
    ]
    parts += ["\n".join(f"- `experiment={f.stem}`: {head(f).strip()}" for f in _experiments()) + "\n"]
    return "\n".join(part for part in parts if part)


def _experiments() -> list[Path]:
    return sorted((CONF / "experiment").glob("*.yaml"))


def head(file: Path) -> str:
    """Return the comment at the top of a file, as Markdown."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return escaped(" ".join(lines)) + "\n" if lines else ""


def escaped(text: str) -> str:
    """Escape Markdown characters in text, except in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    marks = [part if part.startswith("`") else re.sub(r"([*_])", r"\\\1", part) for part in parts]
    # Not \<, which Python's Markdown does not support. A | would end the table cell.
    return "".join(part if part.startswith("`") else entities(r"[<|]", part) for part in marks)


def entities(pattern: str, text: str) -> str:
    """Replace each character that matches the pattern by its HTML entity."""
    return re.sub(pattern, lambda mark: f"&#{ord(mark[0])};", text)


def code(value: str) -> str:
    """Format a value as code in a table cell, which a | would end."""
    if "|" not in value:
        return f"`{value}`"
    return f"<code>{entities('[^A-Za-z0-9 ]', value)}</code>"


def entries(file: Path, prefix: str = "") -> str:
    """Return a table of the settings in a file; for conf/train.yaml, a heading and a table per section."""
    lines: list[str] = []
    node = ""
    listed = list(settings(file))
    targets = {name.removesuffix("_target_"): value for name, value, _ in listed if name.endswith("_target_")}
    for name, value, comment in listed:
        above = name.partition(".")[0]
        if not prefix and above != node and ("." in name or node):
            node = above
            lines += ["", f"### {node}", "", *_HEADER]
        elif not lines:
            lines += _HEADER
        description = comment or _description(file, prefix + name, value)
        default = "required" if value == "???" else code(value)
        kind = TYPES.get(prefix + name) or _type(prefix + name, value, file.stem, targets)
        lines.append(f"| `{prefix}{name}` | {kind} | {default} | {description} |")
    return "\n".join(lines) + "\n" if lines else ""


def _type(name: str, value: str, choice: str, targets: Mapping[str, str]) -> str:
    """Return the type of a setting, from the schema, the signature of its class, or its default."""
    group, _, key = name.partition(".")
    hint: Any = _hint(
        CHOICES[group][choice] if group in CHOICES else Config, key if group in CHOICES else name
    )
    if hint is None and name.startswith("hydra.sweeper."):
        hint = _hint(SweepConfig, key.partition(".")[2])
    above, _, argument = key.rpartition(".")
    target = targets.get(f"{above}." if above else "", "")
    if hint is None and target.startswith(OWN_PACKAGES):
        parameter = inspect.signature(get_object(target)).parameters.get(argument)
        hint = parameter.annotation if parameter else None
    if hint is None:
        hint = type(yaml.safe_load(value))
        hint = str if name.endswith("_target_") else hint
    kind = _type_name(hint)
    return f"{kind} or auto" if value == "auto" and "str" not in kind else kind


def _hint(kind: Any, name: str) -> Any:
    """Return the type of the dataclass field with the dotted name `name`, or None if it does not exist."""
    for word in name.split("."):
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        kind = hints.get(word, hints.get(f"{word}_"))
    return kind


def _type_name(hint: Any) -> str:
    """Return the name of a type in YAML's terms."""
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return ", ".join(_type_name(arg) for arg in args[:-1]) + f" or {_type_name(args[-1])}"
    if hint is types.NoneType:
        return "null"
    origin = typing.get_origin(hint) or hint
    if origin is Callable:
        return "callable"
    if origin in (list, Sequence):
        return "list" if args in ((), (Any,)) else f"list of {_type_name(args[0])}"
    return origin.__name__ if origin in (bool, int, float, str) else "mapping"


def _description(file: Path, name: str, value: str) -> str:
    """Describe a setting that has no comment, from its class or its group's default choice."""
    if name.endswith("_target_") and value.startswith((*OWN_PACKAGES, "hydra_plugins.")):
        docstring = inspect.getdoc(get_object(value)) or ""
        first = docstring.partition("\n")[0].replace("``", "`")
        return escaped(first.removeprefix("Return ").removesuffix("."))
    if value == file.stem:
        return f"set by `{file.parent.name}={value}`"
    return _common().get(name, "")


@functools.cache
def _common() -> dict[str, str]:
    """Return the comment of each setting of train.yaml and of the default choice of each group."""
    found = {name: comment for name, _, comment in settings(CONF / "train.yaml")}
    for entry in yaml.safe_load((CONF / "train.yaml").read_text())["defaults"]:
        for group, choice in entry.items() if isinstance(entry, dict) else ():
            if (file := CONF / group / f"{choice}.yaml").exists():
                found |= {f"{group}.{name}": comment for name, _, comment in settings(file)}
    return found


def settings(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, default, comment) for each setting, except Hydra's own."""
    above: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        found = _KEY.match(line)
        if found is None:
            continue
        indent, key, value = len(found["indent"]), found["key"], found["value"]
        above = [outer for outer in above if outer[0] < indent]
        name = ".".join([outer for _, outer in above] + [key])
        if value is None:
            above.append((indent, key))
        elif name.split(".")[0] not in ("defaults", "hydra"):
            yield name, value, escaped(found["comment"] or "")


if __name__ == "__main__":
    PAGE.write_text(page())
