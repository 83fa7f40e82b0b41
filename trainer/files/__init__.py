"""Atomic file writes, new directories, remote files, and checked reads of untrusted files."""
