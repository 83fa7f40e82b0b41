"""What becomes of a run when something fails: heartbeats, the watch that reads them, the verdict."""
