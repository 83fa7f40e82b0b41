"""Checks and measurements of the network by the preflight, and predictions from them at other sizes."""
