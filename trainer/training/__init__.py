"""What a step works with: its context, what ranks agree on and check, what is measured and logged."""
