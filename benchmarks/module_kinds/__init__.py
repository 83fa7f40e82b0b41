"""Modules as people write them, for benchmarks/modules.py: rows (B, 6) in, two classes out, a habit each."""

from torch import nn

from benchmarks.module_kinds import parameters, passes, state
from benchmarks.module_kinds.base import KINDS

__all__ = ["KINDS", "build", "parameters", "passes", "state"]  # the latter add their kinds to KINDS


def build(kind: str) -> nn.Module:
    return KINDS[kind]()
