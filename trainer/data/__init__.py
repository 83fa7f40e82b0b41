"""Datasets, and how each rank reads its samples."""

from trainer.data.mixture import Mixture

__all__ = ["Mixture"]
