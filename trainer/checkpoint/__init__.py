"""Checkpoints that cannot be torn, and a resume that is exact to the bit."""

from trainer.checkpoint.agreement import Agreement
from trainer.checkpoint.checkpointer import Checkpointer, saved_seed
from trainer.checkpoint.store import best_checkpoint, newest_run_id, read_manifest
from trainer.checkpoint.weights import load_weights, model_state, weights_for

__all__ = [
    "Agreement",
    "Checkpointer",
    "best_checkpoint",
    "load_weights",
    "model_state",
    "newest_run_id",
    "read_manifest",
    "saved_seed",
    "weights_for",
]
