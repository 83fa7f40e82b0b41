"""The challenge finds one hash however a run was disturbed, and says so if there were two."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.programs import finish, started, started_ranks
from trainer.exact import challenge
from trainer.exact.challenge import AllHosts, DrawnMove

COMMAND = ("-m", "trainer.exact.challenge", "--folder")
SHORT = """
from trainer.exact import challenge

challenge.STEPS, challenge.AT_LEAST = 60, 3
challenge.main()
"""


@pytest.mark.slow
def test_killed_and_moved_on_two_hosts_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In the environment that torchrun gives its processes; that these are forked saves their imports."""
    (tmp_path / "short.py").write_text(SHORT)
    words = ("--hosts=2", "--minutes=0.01", "--seed=4", f"--folder={tmp_path}/runs")
    with started_ranks([0, 1], f"{tmp_path}/short.py", *words, forks=True) as hosts:
        ended = [host.wait(200) for host in hosts]
    assert [host.code for host in ended] == [0, 0], ended
    moves = [re.findall(r"^move .*|^.* bits$", host.stdout, re.M) for host in ended]
    assert moves[0] == moves[1] and len(moves[0]) == 4, ended
    assert "comm=halving_doubling on 4" in moves[0][1], "two on each host"
    logs = {log.name for log in (tmp_path / "runs").glob("*.log")}
    assert logs == {f"move{number}.host{host}.log" for number in range(4) for host in range(2)}


def test_other_bits_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(hosts: AllHosts, move: DrawnMove, run_dir: Path, number: int = 0) -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "result.json").write_text(json.dumps({"param_sha256": move.overrides}))

    monkeypatch.setattr(challenge, "run", run)
    monkeypatch.setattr(challenge, "prepare", lambda device: None)
    for overrides, same in (("strategy=ddp", False), ("strategy=single", True)):
        monkeypatch.setattr(challenge, "next_move", lambda *_, words=overrides: DrawnMove(1, words))
        assert challenge.challenge(AllHosts(), minutes=0.01, seed=1, folder=tmp_path) is same
        assert ("OTHER bits" in capsys.readouterr().out) is not same


def test_moves_are_some_that_can_be_made() -> None:
    draw = random.Random(0)
    moves = [challenge.next_move(draw, step=100, moves_left=left) for left in (0.5, *[3.0] * 200)]
    assert not moves[0].victims, "the last one goes to the end"
    for move in moves:
        assert 100 < move.kill_at < challenge.STEPS or not move.victims
        assert "fsdp" not in move.overrides or challenge.LEAVES % move.ranks == 0
        assert {*move.victims} <= {*range(move.ranks)}
        assert move.ranks <= challenge.LEAVES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [((), "use another --folder"), (("--hosts=2",), "torchrun --nnodes=2 --nproc-per-node=1")],
)
def test_a_used_folder_and_hosts_without_torchrun_are_refused(
    more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    done = finish(*COMMAND, str(tmp_path), *more)
    assert (done.code, "Traceback" in done.stderr) == (2, False), done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_a_signal_ends_its_ranks_too(tmp_path: Path) -> None:
    with started(*COMMAND, str(tmp_path), forks=True) as program:
        while not (tmp_path / "undisturbed" / "metrics.jsonl").exists():
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
