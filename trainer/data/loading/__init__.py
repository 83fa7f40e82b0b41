"""Loading of batches, from data read by index and from streams."""
