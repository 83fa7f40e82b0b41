"""Writes docs/reference/settings.md from the files of conf/ and their comments.

python docs/generate_settings.py
"""

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra.utils import get_object

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
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w/]+):(?: +(?P<value>[^#\s].*?))?(?: +# ?(?P<comment>.*))?$")
_INTRO = """# Settings

This page is made from `conf/` by `python docs/generate_settings.py`; a test compares them. Set any of these
on the command line: `NAME=VALUE`. `python train.py --cfg job` prints all settings of a command line. `???` is
a value that you must give. What `_target_` names is a class or function. Each further key below it is one of
its arguments, and `+KEY=VALUE` adds one that is not listed.

A group has several files, of which the command line takes one: `strategy=fsdp`. The first part of this page
has the settings of every run, the second the groups.
"""


def page() -> str:
    """The whole page."""
    parts = [_INTRO, "## Every run\n", "`conf/train.yaml`.\n", entries(CONF / "train.yaml")]
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            parts += [f"## `{group}={file.stem}`\n", head(file), entries(file, f"{group.replace('/', '.')}.")]
    parts += ["## Experiments\n", "An experiment chooses one of each group, and sets what fits together.\n"]
    parts += ["\n".join(f"- `experiment={f.stem}`: {head(f).strip()}" for f in _experiments()) + "\n"]
    return "\n".join(part for part in parts if part)


def _experiments() -> list[Path]:
    return sorted((CONF / "experiment").glob("*.yaml"))


def head(file: Path) -> str:
    """The comment at the beginning of a file, as text."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    text = escaped(" ".join(lines))
    return f"{text[0].upper()}{text[1:]}{'' if text[-1] in '.?)' else '.'}\n" if text else ""


def escaped(text: str) -> str:
    """Text in which Markdown finds no marks, except `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    marks = [part if part.startswith("`") else re.sub(r"([*_])", r"\\\1", part) for part in parts]
    # GitHub knows \<, Python's Markdown only &lt;
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in marks)


def entries(file: Path, prefix: str = "") -> str:
    """The settings of a file, an item for each: name, default, and what it means; a heading for each node."""
    lines: list[str] = []
    node = ""
    for name, value, comment in settings(file):
        above = name.partition(".")[0]
        if not prefix and above != node and ("." in name or node):
            node = above
            lines += ["", f"### {node}", ""]
        said = comment or _meaning(file, prefix + name, value)
        lines.append(f"- `{prefix}{name}` = `{value}`  \n  {said}")  # two spaces end a line
    return "\n".join(lines) + "\n" if lines else ""


def _meaning(file: Path, name: str, value: str) -> str:
    """Of a setting without a comment: what its class, or a file that every run may have, says of it."""
    if name.endswith("_target_") and value.startswith(("trainer.", "models.", "hydra_plugins.")):
        docstring = inspect.getdoc(get_object(value)) or ""
        said = escaped(docstring.partition("\n")[0].replace("``", "`").removesuffix("."))
        return f"names what is built: {said}"
    if value == file.stem:
        return f"says what `{file.parent.name}={value}` has chosen"
    return _common().get(name, "")


@functools.cache
def _common() -> dict[str, str]:
    """The comments of train.yaml and of each group's default choice."""
    found = {name: comment for name, _, comment in settings(CONF / "train.yaml")}
    for entry in yaml.safe_load((CONF / "train.yaml").read_text())["defaults"]:
        for group, choice in entry.items() if isinstance(entry, dict) else ():
            if (file := CONF / group / f"{choice}.yaml").exists():
                found |= {f"{group}.{name}": comment for name, _, comment in settings(file)}
    return found


def settings(file: Path) -> Iterator[tuple[str, str, str]]:
    """(dotted name, default, comment) of each setting; not Hydra's own."""
    above: list[tuple[int, str]] = []
    continued = ""
    for line in file.read_text().splitlines():
        found = _KEY.match(line)
        if found is None:
            continued = ""
            continue
        indent, key, value = len(found["indent"]), found["key"], found["value"]
        above = [outer for outer in above if outer[0] < indent]
        name = ".".join([outer for _, outer in above] + [key])
        comment = escaped(found["comment"] or "")
        if value is None:
            above.append((indent, key))
            continued = comment
        elif name.split(".")[0] not in ("defaults", "hydra"):
            said = f"{continued}: {comment}" if continued and comment else continued or comment
            yield name, value, said
            continued = ""


if __name__ == "__main__":
    PAGE.write_text(page())
