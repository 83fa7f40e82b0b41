"""Run the matrix of benchmarks.gpu.matrix with train.compile=true."""

from collections.abc import Iterator

from benchmarks.gpu import matrix
from benchmarks.gpu.day import Day, Row


def measure(day: Day) -> Iterator[Row]:
    return matrix.measure(day, compiled=True)
