"""Checkpoints that cannot be torn, and a resume that is exact to the bit."""

from trainer.checkpoint.checkpointer import Checkpointer, saved_seed
from trainer.checkpoint.model import read_averages, read_model
from trainer.checkpoint.source import Source
from trainer.checkpoint.store import is_run_id, newest_run_id, read_manifest
from trainer.checkpoint.weights import load_weights, weights_for

__all__ = [
    "Checkpointer",
    "Source",
    "is_run_id",
    "load_weights",
    "newest_run_id",
    "read_averages",
    "read_manifest",
    "read_model",
    "saved_seed",
    "weights_for",
]
