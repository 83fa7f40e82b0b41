"""From a `_target_` node of the config to the object it describes."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from trainer.errors import UserError, class_and_line, may_pass, on_one_line

# Hydra 1.4 asks which targets it may call: any, because the user's own are the point (SECURITY.md).
_ANY = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
_ALLOWED = {} if _ANY is None else {"_execution_whitelist_": _ANY}


def instantiate(name: str, node: dict[str, Any], *args: Any, facts: object = None, **kwargs: Any) -> Any:
    """Call the node's `_target_` with its other keys, `args` and `kwargs`.

    A key with the value `auto` is set to the attribute of that name of `facts`, also in nested nodes.

    Args:
        name: the node's name in the config, for messages.

    Raises:
        UserError: the target does not exist, has no such argument or refuses a value; or `auto` is set for
            a key that `facts` does not have.
    """
    built = filled(name, node, facts)
    try:
        return hydra.utils.instantiate(built, *args, **kwargs, **_ALLOWED, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        mistakes = TypeError | ValueError | LookupError | ImportError | OSError
        if cause is None or (isinstance(cause, mistakes) and not may_pass(cause)):
            raise _cannot(*_within(name, node, error), cause or error) from cause
        raise cause from None


def _within(name: str, node: dict[str, Any], error: InstantiationException) -> tuple[str, dict[str, Any]]:
    """The node that cannot be built, which may be a part of `node`, after its name in the config."""
    path = re.search(r"\nfull_key: (\S+)$", str(error))
    part: Any = node
    for word in path[1].split(".") if path else ():
        key, number = (word, "") if word in part else re.fullmatch(r"(.*?)(\d*)", word).groups()  # type: ignore[union-attr]
        part, name = part[key], f"{name}.{key}"
        if number:  # of a list; Hydra writes it without a dot
            part, name = part[int(number)], f"{name}.{number}"
    return name, part


def _cannot(name: str, node: dict[str, Any], reason: Exception) -> UserError:
    target = node["_target_"]
    said = class_and_line(reason) if isinstance(reason, LookupError) else on_one_line(reason)  # a bare key
    unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
    hint = ""
    if unknown and unknown[1] in node:
        hint = f"; ~{name}.{unknown[1]} leaves it out"
    elif unknown and unknown[1] == "split":
        hint = "; let it take split, which is train or eval"
    elif isinstance(reason, TypeError) and "required positional argument" in said:
        hint = f"; set it in {name}, or have a function passed on uncalled by +{name}._partial_=true"
    return UserError(f"{name}: {target} cannot be built: {said}{hint}{_hidden(target)}")


def _hidden(target: str) -> str:
    """A hint if a user's folder has the name of one of this project's packages, and hides it."""
    name = target.partition(".")[0]
    theirs = Path(name).resolve()
    if name not in ("models", "trainer") or not theirs.exists():
        return ""
    ours = Path(str(import_module(name).__file__)).resolve().parent
    return "" if ours == theirs else f"; {name} is {ours} here and hides {theirs}: rename yours"


def filled(name: str, node: dict[str, Any], facts: object) -> dict[str, Any]:
    """`node` with the attributes of `facts` in place of `auto`; see `instantiate`."""
    found = {}
    for key, value in node.items():
        if isinstance(value, dict) and "_target_" in value:
            value = filled(f"{name}.{key}", value, facts)
        found[key] = _fact(name, key, facts) if value == "auto" else value
    return found


def _fact(name: str, key: str, facts: object) -> Any:
    fact = getattr(facts, key, None)
    if fact is None:
        of = getattr(facts, "class_name", type(facts).__name__)  # not a setting's wrapper around it
        raise UserError(f"{name}.{key} is auto, but {of} has no {key}; give it a value")
    return list(fact) if isinstance(fact, tuple) else fact  # as Hydra 1.3 makes of it; 1.4 does not
