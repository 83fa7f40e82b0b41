"""Predicts how much of each device's memory a run needs: `python -m trainer.memory`."""
