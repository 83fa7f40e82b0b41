"""Benchmarks for a limited time on a GPU: parts with estimated times and limits, the most valuable first.

    benchmarks/gpu.sh [--out DIR] --list | --budget SECONDS | NAME... | table

    --list             print the parts, with their estimated times on an H100, and what each must show
    --budget SECONDS   run, in order, the parts that fit into the time and have no results in DIR yet
    NAME...            run these parts
    table              print the results in DIR, and write them to DIR/gpu.json

Each part runs in a separate process, and writes DIR/NAME.json at once: GPU, driver, versions, date, seconds,
and a row for each measurement. If a command may take at most ten minutes, repeat the same command until all
parts have run:

    benchmarks/gpu.sh --budget 560

The comparison of GPT-2 with nanoGPT then gets a whole command. Compiled kernels are kept in --cache. The exit
status is 1 if a part failed or missed its limit. Move DIR/gpu.json to benchmarks/results, under a name with
the GPU and the date.

With --dry-run, all parts run with tiny sizes on a CPU, with gloo, to find mistakes before GPU time is spent.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.day import Day, Row, machine, table
from benchmarks.gpu.parts import PARTS, Part, chosen, listing

_BY_NAME = {part.name: part for part in PARTS}


def main() -> int:
    options = _options()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(options.cache / "triton"))
    day, begin = Day(options.dry_run, options.out), time.monotonic()
    parts = [_BY_NAME[name] for name in options.names if name != "table"]
    if options.budget is not None:
        left = [part for part in parts or PARTS if not _is_measured(day, part)]
        parts = chosen(left, options.budget)
        if not parts:
            why = f"none of them fits into {options.budget:g} s" if left else f"{options.out} has all results"
            print(f"no part to run: {why}")
    if options.list:
        is_choice = options.names or options.budget is not None
        print(listing(parts if is_choice else PARTS))
        return 0
    if parts and not (day.dry or day.on_gpu):
        print("torch sees no GPU; use --dry-run to run tiny sizes on the CPU", file=sys.stderr)
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        print(f"--out {options.out}: {error.strerror}; choose another folder", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs finally blocks
    if parts and not options.in_process:
        print(f"{listing(parts)}\n", flush=True)
    status = 0
    if day.dry and parts:
        _shrink()
    with tempfile.TemporaryDirectory() as site:
        if options.wheels is not None:
            _install(options.wheels, site)
        for part in parts:
            spent = time.monotonic() - begin
            if not day.dry and options.budget is not None and spent + part.seconds > options.budget:
                print(
                    f"{part.name}: postponed, {options.budget - spent:.0f} s of the budget are left\n",
                    flush=True,
                )
            elif day.dry or options.in_process:  # loading torch takes longer than the part
                status |= _measure(day, part)
            else:
                status |= _run_in_subprocess(day, part)
    if "table" in options.names:
        status |= _table(day)
    return status


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("names", nargs="*", type=_name, metavar="NAME", help="parts to run, or table")
    add("--list", action="store_true", help="print the parts that would run")
    add("--budget", type=float, metavar="SECONDS", help="run the parts that fit into this time")
    add("--out", type=Path, default=Path("gpu_day"), help="folder for results (gpu_day)")
    add(
        "--cache",
        type=Path,
        default=Path.home() / ".cache/ringmaster-gpu",
        help="folder for compiled kernels",
    )
    add("--wheels", type=Path, metavar="DIR", help="folder of wheels to install for this call only")
    add("--dry-run", action="store_true", help="tiny sizes on a CPU")
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.names or options.list or options.budget is not None):
        parser.error("nothing to do; see --help")
    return options


def _name(text: str) -> str:
    if text not in {*_BY_NAME, "table"}:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(_BY_NAME)}, table")
    return text


def _shrink() -> None:
    torch.set_num_threads(1)
    traced_only: Any = functools.partial(torch.compile, backend="eager")  # inductor takes minutes
    torch.compile = traced_only  # type: ignore[misc]


def _install(wheels: Path, site: str) -> None:
    """Install `wheels` into the folder `site`, for this process and its children."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
    subprocess.run([*pip, *map(str, wheels.glob("*.whl"))], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), site)))
    sys.path.append(site)


def _run_in_subprocess(day: Day, part: Part) -> int:
    """Run a part for at most twice its estimated time, so that a hang doesn't use up the GPU time."""
    command = [sys.executable, "-m", "benchmarks.gpu", part.name, "--out", str(day.out), "--in-process"]
    command += ["--dry-run"] * day.dry
    begin, limit_s = time.monotonic(), min(570, max(120, 2 * part.seconds))
    problem = f"did not end within {limit_s} s"
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s)
        problem = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        status = 1
    finally:  # also after Ctrl-C: the part would keep the GPU
        _end(process)
    found = _read(day, part) or {"rows": [], "complete": False}
    if not _is_complete(found):  # it crashed or hung, and would do so in the next call, too
        rows = [*(Row(**row) for row in found["rows"]), Row(part.name, None, ok=False, note=problem)]
        _write(day, part, rows, time.monotonic() - begin, complete=True)
    return int(status != 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a part that still runs; it gets time to end the ranks that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(45)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _measure(day: Day, part: Part) -> int:
    begin, rows = time.perf_counter(), list[Row]()
    _write(day, part, rows, 0.0, complete=False)
    try:
        for row in part.measure(day):
            rows.append(row)
            # At once, because the part may be interrupted. An interrupted part has not passed.
            _write(day, part, rows, time.perf_counter() - begin, complete=False)
    except Exception:
        rows.append(Row(part.name, None, ok=False, note=traceback.format_exc()))
    seconds = time.perf_counter() - begin
    _write(day, part, rows, seconds, complete=True)
    print(f"{table(rows)}\n{part.name}: {seconds:.0f} s (estimate {part.seconds})\n", flush=True)
    return int(any(row.ok is False for row in rows))


def _write(day: Day, part: Part, rows: Sequence[Row], seconds: float, complete: bool) -> None:
    judged = [row.ok for row in rows if row.ok is not None]
    facts = {
        "part": part.name,
        "bar": part.bar,
        "complete": complete,
        "passed": complete and (all(judged) if judged else None),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "estimated_seconds": part.seconds,
        "machine": machine(day),
        "rows": [asdict(row) for row in rows],
    }
    (day.out / f"{part.name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def _read(day: Day, part: Part) -> dict[str, Any] | None:
    path = day.out / f"{part.name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def _is_measured(day: Day, part: Part) -> bool:
    """Return whether the results contain this part without an interruption, measured on a GPU."""
    found = _read(day, part)
    return not day.dry and found is not None and not found["machine"]["dry"] and _is_complete(found)


def _is_complete(found: dict[str, Any]) -> bool:
    """Whether the part was not interrupted."""
    return bool(found.get("complete", True))


def _table(day: Day) -> int:
    found = [part for part in map(functools.partial(_read, day), PARTS) if part is not None]
    missing = [part.name for part in PARTS if _read(day, part) is None]
    (day.out / "gpu.json").write_text(json.dumps({"parts": found, "not_run": missing}, indent=1) + "\n")
    for part in found:
        facts = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
        mark = {None: "no limit", True: "passed", False: "MISSED"}[part["passed"]]
        mark = mark if _is_complete(part) else "INTERRUPTED"
        print(f"{part['part']} ({part['bar']}): {mark}; {part['seconds']:.0f} s, {part['date']}, {facts}")
        print(table([Row(**row) for row in part["rows"]]), end="\n\n")
    print(f"not run: {', '.join(missing) or 'none'}")
    return int(any(part["passed"] is False for part in found))


if __name__ == "__main__":
    sys.exit(main())
