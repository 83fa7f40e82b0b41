"""The ranks of a run: process groups, rendezvous, collectives and agreement."""
