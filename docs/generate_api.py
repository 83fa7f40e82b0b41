"""Write docs/reference/api.md, the public Python API, from signatures and docstrings.

python docs/generate_api.py
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_object

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
TASKS = ("Classification", "MultiLabel", "Regression", "LanguageModelling", "OwnLoss")
SCHEDULES = ("constant", "cosine", "linear", "wsd", "Plateau")
PARTS = {
    "Run": ["trainer.train", "trainer.open", "trainer.load_model", "trainer.gather", "trainer.cli.main"],
    "A trained run": ["trainer.inference.trained_run.TrainedRun"],
    "Errors": [f"trainer.errors.{name}" for name in ("UserError", "NonFiniteError", "StoppedBySignal")],
    "Your own task": ["trainer.tasks.Task", "trainer.tasks.Evaluation", "trainer.tasks.Shown"],
    "Tasks": [f"trainer.tasks.{name}" for name in TASKS],
    "Data": [
        "trainer.data.stream.Stream",
        "trainer.data.Mixture",
        "trainer.data.order.ByLength",
        "trainer.data.padding.Padding",
    ],
    "Loggers": ["trainer.loggers.Logger"],
    "Schedules": [f"trainer.optim.schedules.{name}" for name in SCHEDULES],
}
# Classes whose methods users call or override. Only the trainer calls those of other classes.
WITH_METHODS = ("TrainedRun", "Task", "Stream", "Logger")
_INTRO = """# Python API

The functions and classes that your program may call, subclass, or name in `_target_`. Each entry shows the
first sentence of the docstring. Examples: [train and load models from Python](../howto/from-python.md),
[tasks](../howto/own-metric.md), [streams](../howto/big-data.md#your-own-stream),
[loggers](../howto/watch-a-run.md#your-own-logger),
[schedules](../howto/optimizers-and-schedules.md#schedules).
"""


def page() -> str:
    """Return the page."""
    parts = [_INTRO]
    for title, names in PARTS.items():
        parts += [f"## {title}\n", *(entry(name) for name in names)]
    return "\n".join(parts)


def entry(name: str) -> str:
    """Return the section of a function, or of a class with its public members."""
    value = get_object(name)
    source = textwrap.dedent(inspect.getsource(value))
    node, short = ast.parse(source).body[0], name.rpartition(".")[2]
    lines = [f"### {name}\n"]
    if isinstance(node, ast.FunctionDef):
        lines.append(item(f"{short}{signature(value, node)}", inspect.getdoc(value)))
    elif isinstance(node, ast.ClassDef):
        inits = [each for each in functions(node) if each.name == "__init__" and short not in WITH_METHODS]
        lines.append(
            item("".join([short, *(signature(value, each) for each in inits)]), inspect.getdoc(value))
        )
        lines += attributes(node, source)
        if short in WITH_METHODS:
            lines += [method(value, each) for each in functions(node) if each.name[0] != "_"]
    return "\n".join(lines) + "\n"


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def method(owner: Any, node: ast.FunctionDef) -> str:
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        return item(f"{node.name}: {typed(node.returns)}", ast.get_docstring(node))
    return item(f"{node.name}{signature(getattr(owner, node.name), node)}", ast.get_docstring(node))


def signature(value: Any, node: ast.FunctionDef) -> str:
    """Return the arguments without `self`, with annotations as written and evaluated defaults."""
    defaults = {name: each.default for name, each in inspect.signature(value).parameters.items()}
    words = []
    for each in (*node.args.args, *node.args.kwonlyargs):
        if each.arg != "self":
            default = defaults[each.arg]
            shown = "" if default is inspect.Parameter.empty else f" = {default!r}"
            words.append(f"{each.arg}: {typed(each.annotation)}{shown}")
    if node.args.kwarg is not None:
        words.append(f"**{node.args.kwarg.arg}: {typed(node.args.kwarg.annotation)}")
    returns = "" if node.name == "__init__" else f" -> {typed(node.returns)}"
    return f"({', '.join(words)}){returns}"


def typed(annotation: Any) -> str:
    """Return an annotation without the quotes around names that only type checkers import."""
    return re.sub(r"'([^']+)'", r"\1", ast.unparse(annotation))


def attributes(node: ast.ClassDef, source: str) -> Iterator[str]:
    """Yield attributes from the docstring's list, and those followed by a docstring or a comment."""
    listed = inspect.cleandoc(ast.get_docstring(node) or "").partition("Attributes:\n")[2]
    for name, text in re.findall(r"^    (\w+): (.*(?:\n      .*)*)", listed, re.M):
        yield item(name, text)
    for each, below in zip(node.body, [*node.body[1:], None], strict=True):
        comment = source.splitlines()[each.lineno - 1].partition("  # ")[2]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            comment = inspect.cleandoc(str(below.value.value))
        if isinstance(each, ast.AnnAssign):
            yield item(f"{ast.unparse(each.target)}: {typed(each.annotation)}", comment)
        elif isinstance(each, ast.Assign) and comment:
            yield item(ast.unparse(each.targets[0]), comment)


def item(code: str, docstring: str | None) -> str:
    """Return a list item: the code, and below it the first sentence of the docstring."""
    text = " ".join((docstring or "").partition("\n\n")[0].split()).replace("``", "`")
    first = re.split(r"(?<=[.!?]) ", text)[0]
    parts = re.split(r"(`[^`]*`)", f"{first[:1].upper()}{first[1:]}".removesuffix("."))
    sentence = "".join(part if part[:1] == "`" else re.sub(r"([*_])", r"\\\1", part) for part in parts)
    return f"- `{code}`  \n  {sentence}." if sentence else f"- `{code}`"


if __name__ == "__main__":
    PAGE.write_text(page())
