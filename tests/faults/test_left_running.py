"""A program ends with its own status even if a user's thread or process still runs."""

import json
from pathlib import Path

import pytest

from tests.faults.test_ends import TINY, really
from tests.programs import finish, finish_ranks
from tests.ranks import ROOT

HURRIES = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from trainer.faults import left_running
left_running._NAMED_S, left_running._ENDED_S = 0.3, %s
"""
TRAINS = "from ringmaster import main\nmain()\n"
LEAVES = ("data.task._target_=tests.user_parts.LeavesRunning", "~data.task.label_smoothing")


def script(tmp_path: Path, text: str, ended_s: float = 1.0) -> str:
    path = tmp_path / "program.py"
    path.write_text(HURRIES % ended_s + text)
    return str(path)


def run(tmp_path: Path, what: str) -> tuple[str, ...]:
    return (*TINY, *LEAVES, f"+data.task.what={what}", f"run_dir={tmp_path}/run", "train.max_steps=1")


@pytest.mark.slow
def test_a_thread_that_a_run_leaves_is_named_and_the_ranks_end(tmp_path: Path) -> None:
    for rank in finish_ranks(2, script(tmp_path, TRAINS), *run(tmp_path, "thread")):
        assert rank.code == 0, rank
        assert "has ended, with status 0, but not thread uploader (tests/user_parts.py:" in rank.stderr
        assert "in send_for_ever); what still runs 1 s after" in rank.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_a_process_that_a_run_leaves_is_named_and_the_run_ends(tmp_path: Path) -> None:
    code, output = really(script(tmp_path, TRAINS), *run(tmp_path, "process"))
    assert (code, "but not process uploader (pid " in output) == (0, True), output


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        pytest.param("1 / 0", 1, marks=pytest.mark.slow),
        pytest.param("print('done')", 0, marks=pytest.mark.slow),
    ],
)
def test_its_status_is_its_own(end: str, code: int, tmp_path: Path) -> None:
    text = (
        f"import threading\n@left_running.ends_in_time()\ndef main():\n    print('begun')\n"
        f"    threading.Thread(target=threading.Event().wait).start()\n    {end}\nmain()\n"
    )
    ended = finish(script(tmp_path, text), cwd=tmp_path)
    assert (ended.code, ended.stdout.splitlines()[0]) == (code, "begun"), ended
    assert f"ended, with status {code}, but not thread Thread-" in ended.stderr


@pytest.mark.slow
def test_what_ends_by_itself_is_waited_for(tmp_path: Path) -> None:
    text = (
        "import threading, time\ndef send():\n    time.sleep(1)\n    print('sent', flush=True)\n"
        "with left_running.ends_in_time():\n    threading.Thread(target=send).start()\n"
    )
    ended = finish(script(tmp_path, text, ended_s=100.0), cwd=tmp_path)
    assert (ended.code, ended.stdout) == (0, "sent\n")
    assert "but not thread" in ended.stderr
