"""The files of a run in its directory. Does not import torch: a sweep reads these files."""
