"""Load batches, from data that is read by index and from streams."""
