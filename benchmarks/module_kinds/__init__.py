"""Modules with unusual features, for benchmarks/modules.py: inputs (B, 6), two classes, one feature each."""

from torch import nn

from benchmarks.module_kinds import parameters, passes, state
from benchmarks.module_kinds.base import KINDS

__all__ = ["KINDS", "build", "parameters", "passes", "state"]  # these modules add to KINDS


def build(kind: str) -> nn.Module:
    return KINDS[kind]()
