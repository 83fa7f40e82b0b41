"""From a dataset to batches: data read by index, and streams."""
