"""What the preflight checks and measures of a network, and what follows from it at other sizes."""
