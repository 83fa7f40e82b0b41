"""Some ranks hold the parameters, others compute gradients: in common steps, or asynchronously."""
