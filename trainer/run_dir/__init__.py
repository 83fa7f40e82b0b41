"""What a run leaves in its directory. Imports no torch: a sweep reads these files."""
