"""The parts of a day on a GPU, one after another; benchmarks/gpu.sh calls this, and limits its time.

    python -m benchmarks.gpu NAME... --out DIR [--dry-run]

Each part writes DIR/NAME.json and prints its rows. `table` combines DIR into DIR/gpu.json and DIR/gpu.txt.
Exits with status 1 if a part failed or missed its limit.
"""

import argparse
import functools
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.day import Day, Row, table, write

PARTS = (
    *("tests", "matrix", "compiled", "syncs", "gpt2", "resnet", "memory", "checkpoint", "exact", "ranks"),
    *("packed", "sanitized"),
)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="+", choices=[*PARTS, "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, only traced")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    day = Day(options.dry_run, options.out)
    if day.dry:
        torch.set_num_threads(1)
        traced_only: Any = functools.partial(torch.compile, backend="eager")  # compilers take minutes
        torch.compile = traced_only  # type: ignore[misc]
    return max(_whole(day) if name == "table" else _part(day, name) for name in options.names)


def _part(day: Day, name: str) -> int:
    begin, rows = time.perf_counter(), list[Row]()
    write(day, name, [Row(name, None, ok=False, note="ended before its first figure")])
    try:
        for row in importlib.import_module(f"benchmarks.gpu.{name}").measure(day):
            rows.append(row)
            write(day, name, rows)  # at once: an interrupted call keeps its rows
    except Exception:
        rows.append(Row(name, None, ok=False, note=traceback.format_exc()))
        write(day, name, rows)
    print(f"{table(rows)}\n{name}: {time.perf_counter() - begin:.0f} s\n", flush=True)
    return int(any(row.ok is False for row in rows))


def _whole(day: Day) -> int:
    found: dict[str, Any] = {}
    for name in PARTS:
        path = day.out / f"{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else {"rows": []}
        found[name] = rows if rows["rows"] else {"rows": [{"what": name, "value": None, "note": "not run"}]}
    (day.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    rows = [Row(**row) for part in found.values() for row in part["rows"]]
    machine = next((part["machine"] for part in found.values() if "machine" in part), {})
    text = f"{', '.join(f'{key} {value}' for key, value in machine.items())}\n{table(rows)}\n"
    (day.out / "gpu.txt").write_text(text)
    print(text)
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
