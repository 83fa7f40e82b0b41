"""Ringmaster: a distributed training harness for PyTorch, with a core that is short enough to read."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import load_model, open, train
    from trainer.distributed.gather_samples import gather

if sys.platform not in ("linux", "darwin"):  # needs POSIX file locks and signals
    raise ImportError(f"Ringmaster runs on Linux and macOS; this system is {sys.platform}")

__all__ = ["gather", "load_model", "open", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that checking settings does not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "trainer.distributed.gather_samples" if name == "gather" else "trainer.api"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
