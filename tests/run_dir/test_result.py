"""result.json and failure.json: atomic, for the last step of this run, even with a failing disk."""

import json
from pathlib import Path

from trainer.files import failure_file
from trainer.run_dir.metrics_file import RESULT, write_result


def test_a_result_is_kept_if_no_step_was_added(tmp_path: Path) -> None:
    def left() -> object:
        return json.loads((tmp_path / RESULT).read_text())

    first, again = {"steps": 10, "ms_per_step": 3.5}, {"steps": 10, "ms_per_step": None}
    write_result(tmp_path, first, made_steps=True)
    write_result(tmp_path, again, made_steps=False)
    assert left() == first
    (tmp_path / RESULT).write_text('{"steps": 10, "ms_')  # a kill, by who wrote it in place
    write_result(tmp_path, again, made_steps=False)
    assert left() == again
    longer = {"steps": 20, "ms_per_step": None}  # killed between the last checkpoint and the result
    write_result(tmp_path, longer, made_steps=False)
    assert left() == longer
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_a_disk_error_while_writing_a_failure_raises_nothing(tmp_path: Path) -> None:
    """The failure itself is more important than its file."""
    (tmp_path / failure_file.NAME).mkdir()
    assert not failure_file.write(tmp_path, {"status": 2, "message": "the disk is full"})
    assert [path.name for path in tmp_path.iterdir()] == [failure_file.NAME]
