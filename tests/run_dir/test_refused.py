"""A resume that fails does not change an intact run."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

import trainer
from tests.ranks import RankFailure, run_ranks
from tests.runs import train
from trainer import cli
from trainer.config.saved_run import saved_settings
from trainer.errors import UserError
from trainer.evaluate import evaluate
from trainer.files import failure_file
from trainer.run_dir.claim import LOCK

TINY = (
    "logger=jsonl",
    "model.hidden=[8]",
    "schedule=constant",
    "train.log_every_steps=2",
    "checkpoint.every_steps=3",
)
REFUSED = {
    "another model": (["model.hidden=[9]"], "from a different model"),
    "another optimizer": (["optim=adamw"], "optim"),
    "other data": (["data=fake"], "the training data"),
    "a profile after the end": (["+train.profile={start: 90, steps: 2}"], "train.profile"),
    "no logger": (["+logger.mine._target_=tests.user_parts.Deaf"], "Deaf"),
    "a damaged checkpoint": (["resume=RUN_DIR/checkpoints/step_00000003"], "damaged"),
}


def files_of(run_dir: Path) -> dict[str, str]:
    """Return the contents of each file except the lock, which contains its owner."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refusals(run_dir: Path) -> dict[str, tuple[str, set[str]]]:
    """Return by case the message and the changed files."""
    train(*TINY, "train.max_steps=4", f"run_dir={run_dir}")
    if os.environ["RANK"] == "0":
        (run_dir / "checkpoints" / "step_00000003" / "state.json").write_text("{}")
    was, found = files_of(run_dir), {}
    for name, (overrides, _) in REFUSED.items():
        words = [word.replace("RUN_DIR", str(run_dir)) for word in overrides]
        try:
            train(*TINY, "train.max_steps=6", f"run_dir={run_dir}", "resume=auto", *words)
        except UserError as error:
            found[name] = str(error), {path for path, _ in was.items() ^ files_of(run_dir).items()}
            if dist.is_initialized():  # after an error, only the end of the process would destroy it
                dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_failed_resume_changes_no_file_of_an_intact_run(tmp_path: Path) -> None:
    found = run_ranks(refusals, 2, tmp_path, init=False)[0]
    assert {name: changed for name, (_, changed) in found.items()} == {name: set() for name in REFUSED}
    assert [name for name, (said, _) in found.items() if REFUSED[name][1] not in said] == [], found
    result = json.loads((tmp_path / "result.json").read_text())
    assert trainer.load_model(tmp_path)
    (evaluated,) = run_ranks(evaluate, 1, saved_settings(tmp_path), init=False)
    assert evaluated["eval/loss"] == pytest.approx(result["eval/loss"])
    (resumed,) = run_ranks(
        train, 1, *TINY, "train.max_steps=6", f"run_dir={tmp_path}", "resume=auto", init=False
    )
    assert resumed["steps"] == 6
    assert "max_steps: 6" in (tmp_path / "config.yaml").read_text()


def broken(*overrides: str) -> None:
    def build_task(_: object) -> None:
        raise RuntimeError("the set-up is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.assemble.build_task", build_task)
        train(*TINY, *overrides)


@pytest.mark.slow
def test_an_error_in_the_set_up_is_also_written_to_a_used_directory(tmp_path: Path) -> None:
    """failure.json and train.log have the reason, even if this attempt never owned the directory."""
    run_ranks(train, 1, *TINY, "train.max_steps=4", f"run_dir={tmp_path}", init=False)
    settings = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(RankFailure, match="the set-up is broken"):
        run_ranks(broken, 1, f"run_dir={tmp_path}", "resume=auto", "optim.lr=0.5", init=False)
    for file in ("failure.json", "train.log"):
        assert "the set-up is broken" in (tmp_path / file).read_text()
    assert (tmp_path / "config.yaml").read_bytes() == settings


def test_an_error_is_not_reported_with_a_previous_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure_file.write(tmp_path, {"status": 2, "message": "of an earlier run"})
    for message, words in ((None, "see its output"), ("of this one", "of this one")):

        def launch(*_: object, message: str | None = message) -> tuple[int, None]:
            if message is not None:
                failure_file.write(tmp_path, {"status": 2, "message": message})
            return 2, None

        monkeypatch.setitem(cli.LAUNCHERS, "local", launch)
        with pytest.raises(UserError, match=words):
            trainer.train([f"run_dir={tmp_path}"], processes=2)
