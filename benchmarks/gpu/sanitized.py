"""Run the tests that need a GPU with torch's stream sanitizer."""

from benchmarks.gpu.day import Day, Row
from benchmarks.gpu.tests import measure_with


def measure(day: Day) -> list[Row]:
    return measure_with(day, "cuda-marked tests without a race", TORCH_CUDA_SANITIZER="1")
