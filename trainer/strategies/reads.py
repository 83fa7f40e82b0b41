"""Whose parameters a model takes without calling their module, as its source tells: `self.head.weight`."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_ELEMENT = "[]"
_FACTS = ("dtype", "device", "shape", "ndim", "size", "numel", "requires_grad")  # shards know them as well
_Path = tuple[str, ...]


def read_from_outside(model: nn.Module) -> set[nn.Module]:
    """The submodules whose parameters, or those of one in them, are taken by the code of a module above.

    Followed are `forward` and those methods and properties of `self` that it uses; in them, what begins with
    `self` and goes on with names and indices. What local names stand for is not known.
    """
    found: set[nn.Module] = set()
    paths: dict[type, set[_Path]] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in paths:
            paths[kind] = {path for function in _used(kind) for path in _paths(function) if len(path) > 1}
        for path in paths[kind]:
            found |= _passed(module, path)
    return found


def _passed(module: nn.Module, path: _Path) -> set[nn.Module]:
    """The modules below `module` on a path that ends in a parameter."""
    found: set[nn.Module] = set()
    frontier: list[tuple[nn.Module, ...]] = [(module,)]
    for name, following in itertools.pairwise((*path, "")):
        if following not in _FACTS:
            found.update(*(way[1:] for way in frontier if way[-1]._parameters.get(name) is not None))
        frontier = [
            (*way, child)
            for way in frontier
            for key, child in way[-1].named_children()
            if name in (key, _ELEMENT)
        ]
    return found


def _used(kind: type) -> Iterator[Callable[..., Any]]:
    """`forward`, and what else of the class it uses by way of `self`."""
    seen, waiting = {"forward"}, ["forward"]
    while waiting:
        value = inspect.getattr_static(kind, waiting.pop())
        function = value.fget if isinstance(value, property) else value
        if not inspect.isfunction(function):
            continue
        yield function
        names = {path[0] for path in _paths(function)}
        own = {name for name in names if hasattr(kind, name) and not hasattr(nn.Module, name)}
        waiting += own - seen
        seen |= own


def _paths(function: Callable[..., Any]) -> set[_Path]:
    """What a method's source takes of its first argument: `self.emb[0].weight` is ("emb", "[]", "weight")."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or in the middle of a line
        return set()
    names = list(inspect.signature(function).parameters)
    found, begun = set(), set()
    for node in ast.walk(tree):
        if node in begun:  # a part of a longer path, which comes first
            continue
        path: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            path.append(node.attr if isinstance(node, ast.Attribute) else _ELEMENT)
            node = node.value
            begun.add(node)
        if path and names and isinstance(node, ast.Name) and node.id == names[0]:
            found.add(tuple(reversed(path)))
    return found
