"""The parts of a step: its context, what ranks agree on and check, what is measured and logged."""
