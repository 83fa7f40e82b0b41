"""One step and one evaluation before the first step, to find mistakes early."""
