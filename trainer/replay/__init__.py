"""Rerun steps of a run, to find out what happened in one of them. Importing it does not import torch."""
