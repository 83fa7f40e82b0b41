"""Checkpoints that cannot be torn, and a resume that is exact to the bit."""

from trainer.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
