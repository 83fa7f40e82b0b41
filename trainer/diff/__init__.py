"""Where two runs part: compare their files, then replay both and compare the replays. Does not import torch."""
