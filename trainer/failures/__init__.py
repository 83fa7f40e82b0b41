"""Handle failures: heartbeats, the watch that reads them, the diagnosis, and the end of the run."""
