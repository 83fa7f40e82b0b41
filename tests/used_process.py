"""Find what a function has left behind in a rank, and restore what can be restored.

A rank that is used again must be as clean as a new one, or a test could pass because of another. Environment,
directory, generators, signal handlers, loggers and torch's settings are restored. A rank ends if it cannot be
restored: a replaced function or constant, a thread, a child, a process group, a device mesh or a limit is
left.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data._utils import signal_handling

_OWN_PACKAGES = ("trainer", "models", "tests", "hydra_plugins")
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    staticmethod,
    classmethod,
)
_CONTAINERS = (tuple, dict, list, set)
_OTHERS = (types.ModuleType, logging.Logger, property, int, float, str, Path, type(None))
_VALUES = (*_FUNCTIONS, *_OTHERS, *_CONTAINERS)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
_HOOKS = ("excepthook", "unraisablehook")  # these are restored
_GRACE_S = 1.0  # for threads and children that are about to end


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in _OWN_PACKAGES


class UsedProcess:
    """Created before the first function; call `before_use` and `after_use` around each function."""

    def __init__(self) -> None:
        self._names: dict[types.ModuleType | type, dict[str, Any]] = {}
        self._modules = set(sys.modules)
        self._state = _state()
        self._streams = _open_streams()
        self._limits = [resource.getrlimit(limit) for limit in _LIMITS]

    def before_use(self) -> None:
        """Record all functions, classes and constants that the project's modules define and use."""
        with warnings.catch_warnings():  # some of torch's names are deprecated
            warnings.simplefilter("ignore")
            self._record_all()

    def _record_all(self) -> None:
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and _is_own(name) and module not in self._names:
                self._record(module)
                for used in list(vars(module).values()):
                    if isinstance(used, types.ModuleType) and used not in self._names:
                        self._record(used)

    def _record(self, module: types.ModuleType) -> None:
        self._names[module] = _values(module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value not in self._names:
                self._names[value] = _values(value)

    def after_use(self) -> str:
        """Restore the process; return what cannot be restored, or "" if the process can be used again."""
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = next(self._leftovers(), "")
        _restore(self._state)
        return found

    def _leftovers(self) -> Iterator[str]:
        if dist.is_initialized():
            yield "a process group"
        # DTensor caches meshes, with the coordinate and groups that this process had, and would reuse them.
        if any(type(found) is DeviceMesh for found in gc.get_objects()):
            yield "a device mesh"
        if [resource.getrlimit(limit) for limit in _LIMITS] != self._limits:
            yield "a limit"
        if _open_streams() != self._streams:
            yield "a redirected stream"
        for owner, names in self._names.items():
            values = _values(owner)
            for name in names.keys() | values.keys():
                old, new = names.get(name), values.get(name)
                loaded = old is None and isinstance(new, types.ModuleType)  # a part of a package
                if loaded or old is new or not _differ(old, new):
                    continue
                # torch replaces some of its own functions, such as an optimizer's step.
                of_torch = old is None or _module_of(new).partition(".")[0] == "torch"
                if _is_own(_module_of(owner)) or _is_own(_module_of(new)) or not of_torch:
                    yield f"{owner.__name__}.{name}"
        for name in set(sys.modules) - self._modules:
            module = sys.modules[name]
            if getattr(module, "__spec__", None) is None:
                yield f"the module {name}"
            elif _is_own(name) and not name.startswith("tests") and module not in self._names:
                for value in _values(module).values():
                    if _module_of(value).startswith("tests."):
                        yield f"{name}.{value}"
        deadline = time.monotonic() + _GRACE_S
        while (left := [*_threads(), *_children()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        if left:
            yield f"{left}"


def _threads() -> list[threading.Thread]:
    """Return all other threads, except tqdm's, which never ends."""
    return [thread for thread in threading.enumerate()[1:] if thread.name != "tqdm_monitor"]


def _open_streams() -> list[tuple[int, int]]:
    return [(found.st_dev, found.st_ino) for found in map(os.fstat, (0, 1, 2))]


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _module_of(value: Any) -> str:
    """Return the name of the module that defines a value."""
    return value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""


def _values(owner: types.ModuleType | type) -> dict[str, Any]:
    """Return values that tests may replace; for third-party modules, only functions and classes."""
    kinds = _VALUES if _is_own(_module_of(owner)) else _FUNCTIONS
    return {
        name: (value, tuple(map(id, value.values() if isinstance(value, dict) else value)))
        if isinstance(value, dict | list | set)
        else value
        for name, value in list(vars(owner).items())
        if isinstance(value, kinds) and not name.startswith(("__", "_abc_")) and name not in _HOOKS
    }


def _differ(one: Any, other: Any) -> bool:
    """Return whether two distinct objects differ."""
    if isinstance(one, _FUNCTIONS) or isinstance(other, _FUNCTIONS) or type(one) is not type(other):
        return True
    if isinstance(one, tuple) and len(one) == len(other):
        return any(a is not b and _differ(a, b) for a, b in zip(one, other, strict=True))
    return bool(one != other)


def _state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "directory": Path.cwd(),
        "argv": list(sys.argv),
        "path": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "temporary": tempfile.tempdir,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "warnings": list(warnings.filters),
        "loggers": {name: _logger_state(logger) for name, logger in _loggers().items()},
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }


def _restore(state: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(state["environment"])
    os.chdir(state["directory"])
    sys.argv[:], sys.path[:] = state["argv"], state["path"]
    sys.stdin, sys.stdout, sys.stderr = state["streams"]
    sys.excepthook, sys.unraisablehook, threading.excepthook = state["hooks"]
    tempfile.tempdir = state["temporary"]
    signal.alarm(0)
    for number, handler in state["signals"].items():
        if signal.getsignal(number) != handler and handler is not None:
            with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP have no handler
                signal.signal(number, handler)
    # Otherwise the next loader would not set its handler, and would notice a dead worker only after a timeout.
    signal_handling._SIGCHLD_handler_set = False
    signal.pthread_sigmask(signal.SIG_SETMASK, state["mask"])
    warnings.filters[:] = state["warnings"]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    for name, logger in _loggers().items():
        handlers, filters, level, propagate, disabled = state["loggers"].get(name, ([], [], 0, True, False))
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        for name in [name for name in vars(logger) if callable(getattr(logging.Logger, name, None))]:
            delattr(logger, name)  # from a test
    logging.disable(logging.NOTSET)
    random.seed()
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"])
    torch.set_float32_matmul_precision(state["precision"])
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


def _loggers() -> dict[str, logging.Logger]:
    named = {k: v for k, v in logging.root.manager.loggerDict.items() if isinstance(v, logging.Logger)}
    return {"": logging.root, **named}


def _logger_state(logger: logging.Logger) -> tuple[Any, ...]:
    return list(logger.handlers), list(logger.filters), logger.level, logger.propagate, logger.disabled
