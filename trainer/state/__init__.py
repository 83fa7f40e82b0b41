"""The state of a run that checkpoints save: progress, early stopping, optimizer, moving average."""
