"""Finds parameters that a model reads without calling their module, in its source: `self.head.weight`.

FSDP gathers a unit's parameters only while the unit is called, so a module whose parameters are read outside
must not be a unit. Without this, strategy=fsdp refuses torchvision's Swin, which reads `self.qkv.weight` in
its attention, and models with nn.MultiheadAttention, such as torchvision's ViT, if its `out_proj` has
strategy.unit_min_params parameters.
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_ELEMENT = "[]"
_FACTS = ("dtype", "device", "shape", "ndim", "size", "numel", "requires_grad")  # shards have them too
_Path = tuple[str, ...]


def read_from_outside(model: nn.Module) -> set[nn.Module]:
    """The submodules of which code of a module above reads parameters, their own or those within.

    Reads the source of `forward` and of the methods and properties of `self` that it uses: expressions that
    start with `self`, followed by names and indices. Local variables are not followed.
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
    """The modules below `module` on a path to a parameter."""
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
    """`forward`, and the other functions of the class that it uses through `self`."""
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
    """The paths that a method's source reads of `self`: `self.emb[0].weight` is ("emb", "[]", "weight")."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # created at run time, or in the middle of a line
        return set()
    names = list(inspect.signature(function).parameters)
    found, begun = set(), set()
    for node in ast.walk(tree):
        if node in begun:  # part of a longer path, which was visited before
            continue
        path: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            path.append(node.attr if isinstance(node, ast.Attribute) else _ELEMENT)
            node = node.value
            begun.add(node)
        if path and names and isinstance(node, ast.Name) and node.id == names[0]:
            found.add(tuple(reversed(path)))
    return found
