"""Checkpoints that cannot be torn, and a resume that is exact to the bit."""

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.finding import read_averages, read_model, saved_settings_of
from trainer.checkpoint.fits import frozen_digests, unsavable
from trainer.checkpoint.listing import newest_run_id
from trainer.checkpoint.manifest import is_run_id, read_manifest
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.remote import fetch_history, run_at
from trainer.checkpoint.weights import weights_for

__all__ = [
    "Checkpointer",
    "OpenCheckpoint",
    "fetch_history",
    "frozen_digests",
    "is_run_id",
    "newest_run_id",
    "read_averages",
    "read_manifest",
    "read_model",
    "run_at",
    "saved_settings_of",
    "unsavable",
    "weights_for",
]
