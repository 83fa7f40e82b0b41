"""Run the tests that need a GPU."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from benchmarks.gpu.day import Day, Row


def measure(day: Day) -> list[Row]:
    return _measure_with(day, "cuda-marked tests that pass")


def sanitized(day: Day) -> list[Row]:
    """Run the tests with torch's sanitizer, which finds missing waits between streams."""
    return _measure_with(day, "cuda-marked tests without a race", TORCH_CUDA_SANITIZER="1")


def _measure_with(day: Day, what: str, **variables: str) -> list[Row]:
    """Run the tests with additional environment variables."""
    report = day.out / "tests.xml"
    where = day.size(["tests"], ["tests/gpu/test_cuda.py"])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-m",
        "cuda",
        "--continue-on-collection-errors",
        f"--junitxml={report}",
        *where,
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "RINGMASTER_TESTS_OF"
    } | variables
    ended = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = counts["failures"] + counts["errors"]
    ran = counts["tests"] - counts["skipped"] - bad
    note = f"{counts['skipped']} skipped" if bad == 0 else ended.stdout[-3000:]
    all_ran = bad == 0 and (ran > 0 or not day.on_gpu)
    return [Row(what, ran, "", "all", all_ran, note)]
