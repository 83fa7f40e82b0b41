"""The start and the end of the processes of a run. Does not import torch."""
