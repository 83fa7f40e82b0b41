"""Load batches from map-style datasets and from streams."""
