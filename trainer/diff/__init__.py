"""Find where two runs diverge: compare their files, then replays of both. Does not import torch."""
