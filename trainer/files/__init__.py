"""Atomic file writes, new directories, addresses, and checked reads of untrusted files."""
