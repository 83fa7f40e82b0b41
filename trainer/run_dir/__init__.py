"""The files of a run in its directory. Does not import torch: a sweep reads these files."""

RUN, LOCK = "run.json", ".lock"
RENEW_S = 30.0  # how often a run sets the modification time of its lock file to now
