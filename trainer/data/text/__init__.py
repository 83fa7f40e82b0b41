"""Text datasets, whose samples are windows of a text's bytes or tokens."""
