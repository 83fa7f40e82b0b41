"""Injected faults, and the observation of a run with one."""
