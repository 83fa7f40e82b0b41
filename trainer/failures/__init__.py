"""Handling of failures: heartbeats, the watch that reads them, and the failure."""
