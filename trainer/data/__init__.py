"""Datasets, and the loading of each rank's samples."""

from trainer.data.mixture import Mixture

__all__ = ["Mixture"]
