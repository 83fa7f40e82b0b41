"""Faults made on purpose, and a run under one of them as seen from outside."""
