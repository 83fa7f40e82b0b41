"""Rerun steps of a run, to find out what happened in one of them. Does not import torch."""
