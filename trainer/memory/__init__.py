"""What a run would take of each device's memory, known beforehand: `python -m trainer.memory`."""
