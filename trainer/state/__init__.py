"""What a run changes and a checkpoint saves: progress, early end, optimizer state, moving average."""
