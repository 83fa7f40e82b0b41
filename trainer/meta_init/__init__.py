"""Models built without memory, then filled tensor by tensor with the values of a usual construction."""
