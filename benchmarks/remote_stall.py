"""Does a slow remote hold training up? The same training, in turns without and with `checkpoint.remote`.

    python -m benchmarks.remote_stall [--rounds 5] [--steps 600] [--megabytes-per-s 1.0] [--processes 2]

The remote is an S3 server on this machine (pip install s3fs 'moto[server]') behind a proxy that lets so many
MB/s through; a checkpoint is 13 MB, so something is being copied all the time. Prints the median step of each
run, by the windows of 10 steps in its log, and its processor time; then the ratios of both, with the remote
to without. A run's start, its end and the wait there count in the processor time alone.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PIECE_BYTES = 1 << 14


class SlowProxy(threading.Thread):
    """Forwards connections to a port of this machine; what clients send passes at `bytes_per_s` in all.

    Attributes:
        port: to which clients connect.
        num_bytes: that clients have sent.
    """

    def __init__(self, to: int, bytes_per_s: float) -> None:
        super().__init__(daemon=True)
        self._to, self._bytes_per_s = to, bytes_per_s
        self._free_at = 0.0  # when the last piece has passed
        self._listens = threading.Event()
        self.port = self.num_bytes = 0
        self.start()
        self._listens.wait()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        await server.serve_forever()

    async def _forward(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(
            self._pump(from_client, to_server, slowly=True), self._pump(from_server, to_client, slowly=False)
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slowly: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                if slowly:
                    self.num_bytes += len(data)
                    now = time.monotonic()
                    self._free_at = max(self._free_at, now) + len(data) / self._bytes_per_s
                    await asyncio.sleep(self._free_at - now)
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def bucket() -> Iterator[int]:
    """The port of an S3 server in a process of its own, with a bucket."""
    program = (
        "from moto.server import ThreadedMotoServer as S; s = S(port=0, verbose=False); s.start(); "
        "print(s.get_host_and_port()[1], flush=True); s._thread.join()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            sys.exit("no S3 server: pip install s3fs 'moto[server]'")
        request = urllib.request.Request(f"http://127.0.0.1:{int(line)}/bucket", method="PUT")
        urllib.request.urlopen(request)
        yield int(line)
        server.kill()


def trained(run_dir: Path, steps: int, processes: int, remote: str | None, port: int) -> tuple[float, float]:
    """The median milliseconds of a step, and seconds of processor time."""
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "train.py", "launch=local", f"launch.processes={processes}"),
        "model.hidden=[1024,1024]",
        *("optim=adamw", "train.epochs=1000", f"train.max_steps={steps}", "train.log_every_steps=10"),
        *("train.eval_every_epochs=0", "checkpoint.every_steps=50", "checkpoint.every_epochs=null"),
        *("logger=jsonl", f"run_dir={run_dir}", f"checkpoint.remote={remote or 'null'}"),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    windows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps_ms = [line["speed/ms_per_step/step"] for line in windows if "speed/ms_per_step/step" in line]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return statistics.median(steps_ms[2:]), cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--megabytes-per-s", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {"step": [], "processor time": []}
    with tempfile.TemporaryDirectory() as root, bucket() as port:
        proxy = SlowProxy(port, arguments.megabytes_per_s * 1e6)
        for number in range(arguments.rounds):
            found = {}
            for kind in ("without", "with")[:: 1 if number % 2 == 0 else -1]:
                remote = f"s3://bucket/run{number}" if kind == "with" else None
                run_dir = Path(root) / f"{kind}{number}"
                sent = proxy.num_bytes
                found[kind] = trained(run_dir, arguments.steps, arguments.processes, remote, proxy.port)
                step_ms, cpu_s = found[kind]
                sent_mb = (proxy.num_bytes - sent) / 1e6
                print(
                    f"{kind:8s} {step_ms:8.2f} ms a step  {cpu_s:7.1f} s CPU  {sent_mb:6.1f} MB sent",
                    flush=True,
                )
            for name, pair in zip(ratios, zip(found["with"], found["without"], strict=True), strict=True):
                ratios[name].append(pair[0] / pair[1])
    for name, values in ratios.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"with / without, {name:15s} median {statistics.median(values):.3f}  ({spread})   at most 1.05")


if __name__ == "__main__":
    main()
