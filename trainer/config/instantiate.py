"""Build the object that a `_target_` node of the config describes."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from trainer.errors import UserError, class_and_line, is_retryable, on_one_line

# Hydra 1.4 restricts its targets. Ringmaster allows all, because users set their own (SECURITY.md).
_ANY = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
_ALLOWED = {} if _ANY is None else {"_execution_whitelist_": _ANY}


def instantiate(name: str, node: dict[str, Any], *args: Any, facts: object = None, **kwargs: Any) -> Any:
    """Call the `_target_` of `node` with its other keys, `args` and `kwargs`; error messages contain `name`.

    Each value `auto`, also in nested nodes, is replaced with the attribute of `facts` that has the key's
    name.
    """
    built = filled(name, node, facts)
    try:
        return hydra.utils.instantiate(built, *args, **kwargs, **_ALLOWED, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        mistakes = TypeError | ValueError | LookupError | ImportError | OSError
        if cause is None or (isinstance(cause, mistakes) and not is_retryable(cause)):
            raise _build_error(*_culprit(name, node, error), cause or error) from cause
        raise cause from None


def _culprit(name: str, node: dict[str, Any], error: InstantiationException) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the node that cannot be built, which may be inside `node`."""
    path = re.search(r"\nfull_key: (\S+)$", str(error))
    part: Any = node
    for word in path[1].split(".") if path else ():
        key, number = (word, "") if word in part else re.fullmatch(r"(.*?)(\d*)", word).groups()  # type: ignore[union-attr]
        part, name = part[key], f"{name}.{key}"
        if number:  # an index of a list; Hydra writes it without a dot
            part, name = part[int(number)], f"{name}.{number}"
    return name, part


def _build_error(name: str, node: dict[str, Any], reason: Exception) -> UserError:
    target = node["_target_"]
    # The message of a LookupError may be only the key.
    message = class_and_line(reason) if isinstance(reason, LookupError) else on_one_line(reason)
    unknown = re.search(r"unexpected keyword argument '(\w+)'", message)
    hint = ""
    if unknown and unknown[1] in node:
        hint = f"; ~{name}.{unknown[1]} removes it"
    elif unknown and unknown[1] == "split":
        hint = "; add the argument split, which is train or eval"
    elif isinstance(reason, TypeError) and "required positional argument" in message:
        hint = f"; set it in {name}, or pass the function itself with +{name}._partial_=true"
    return UserError(f"{name}: {target} cannot be built: {message}{hint}{_shadowing_hint(target)}")


def _shadowing_hint(target: str) -> str:
    """Return a hint if a folder of the user's has the name of one of this project's packages."""
    name = target.partition(".")[0]
    users = Path(name).resolve()
    if name not in ("models", "trainer") or not users.exists():
        return ""
    ours = Path(str(import_module(name).__file__)).resolve().parent
    return "" if ours == users else f"; {name} is imported from {ours}, which hides {users}: rename that one"


def filled(name: str, node: dict[str, Any], facts: object) -> dict[str, Any]:
    replaced = {}
    for key, value in node.items():
        if isinstance(value, dict) and "_target_" in value:
            value = filled(f"{name}.{key}", value, facts)
        replaced[key] = _auto_value(name, key, facts) if value == "auto" else value
    return replaced


def _auto_value(name: str, key: str, facts: object) -> Any:
    fact = getattr(facts, key, None)
    if fact is None:
        source = getattr(facts, "class_name", type(facts).__name__)  # a wrapper gives the wrapped class
        raise UserError(f"{name}.{key} is auto, but {source} has no {key}; set a value")
    return list(fact) if isinstance(fact, tuple) else fact  # Hydra 1.3 converts tuples to lists; 1.4 does not
