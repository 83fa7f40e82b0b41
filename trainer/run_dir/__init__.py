"""The files in the directory of a run. Importing it does not import torch: a sweep reads these files."""

RUN, LOCK = "run.json", ".lock"
RENEW_S = 30.0  # interval at which a run updates the modification time of its lock file
