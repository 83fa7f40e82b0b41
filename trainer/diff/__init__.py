"""Where two runs part: compare their files, then replays of both. Does not import torch."""
