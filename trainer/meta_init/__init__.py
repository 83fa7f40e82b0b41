"""Models built without memory, and filled tensor by tensor with the numbers that they would have."""
