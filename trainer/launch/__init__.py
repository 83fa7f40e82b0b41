"""Start and end the processes of a run, without importing torch."""
