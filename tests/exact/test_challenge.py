"""The challenge: an interrupted run ends with the same hash, and different hashes are reported."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.programs import finish, started
from trainer.exact import challenge
from trainer.exact.challenge import Leg

COMMAND = ("-m", "trainer.exact.challenge", "--folder")
SHORT = """
from trainer.exact import challenge

challenge.STEPS, challenge.MIN_LEGS = 60, 3
challenge.main()
"""


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    ended = finish(f"{tmp_path}/short.py", "--minutes=0.01", "--seed=4", f"--folder={tmp_path}/runs")
    assert ended.code == 0, ended
    legs = re.findall(r"^leg .*|^.* bits$", ended.stdout, re.M)
    assert len(legs) == 4 and "comm=halving_doubling on 4" in legs[1], ended
    assert {log.name for log in (tmp_path / "runs").glob("*.log")} == {f"leg{each}.log" for each in range(4)}


def test_different_bits_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(leg: Leg, run_dir: Path, number: int = 0, device: str = "cpu") -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "result.json").write_text(json.dumps({"param_sha256": leg.overrides}))

    monkeypatch.setattr(challenge, "run", run)
    monkeypatch.setattr(challenge, "prepare", lambda device: None)
    for overrides, same in (("strategy=ddp", False), ("strategy=single", True)):
        monkeypatch.setattr(challenge, "next_leg", lambda *_, words=overrides: Leg(1, words))
        assert challenge.challenge(minutes=0.01, seed=1, folder=tmp_path) is same
        assert ("DIFFERENT bits" in capsys.readouterr().out) is not same


def test_random_legs_can_be_run() -> None:
    draw = random.Random(0)
    legs = [challenge.next_leg(draw, step=100, legs_left=left) for left in (0.5, *[3.0] * 200)]
    assert not legs[0].victims, "the last leg trains to the end"
    for leg in legs:
        assert 100 < leg.kill_at < challenge.STEPS or not leg.victims
        assert "fsdp" not in leg.overrides or challenge.CHUNKS % leg.ranks == 0
        assert {*leg.victims} <= {*range(leg.ranks)}
        assert leg.ranks <= challenge.CHUNKS


@pytest.mark.slow
def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "uninterrupted").mkdir()
    done = finish(*COMMAND, str(tmp_path))
    assert (done.code, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "use another --folder" in done.stderr


@pytest.mark.slow
def test_a_signal_ends_its_ranks_too(tmp_path: Path) -> None:
    with started(*COMMAND, str(tmp_path), forks=True) as program:
        while not (tmp_path / "uninterrupted" / "metrics.jsonl").exists():
            assert program.poll() is None
            time.sleep(0.05)
        (rank,) = (
            int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        )
        program.send_signal(signal.SIGTERM)
        ended = program.wait(20)
    assert (ended.code, ended.stderr) == (128 + signal.SIGTERM, "")
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
