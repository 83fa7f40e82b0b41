"""result.json and failure.json: whole or absent, of this run's last step, even with a failing disk."""

import json
from pathlib import Path

from trainer.files import failure_file
from trainer.run_dir.metrics_file import RESULT, write_result


def test_a_result_stands_where_nothing_was_added_to_it(tmp_path: Path) -> None:
    def left() -> object:
        return json.loads((tmp_path / RESULT).read_text())

    first, again = {"steps": 10, "ms_per_step": 3.5}, {"steps": 10, "ms_per_step": None}
    write_result(tmp_path, first, made_steps=True)
    write_result(tmp_path, again, made_steps=False)
    assert left() == first
    (tmp_path / RESULT).write_text('{"steps": 10, "ms_')  # a kill, by who wrote it in place
    write_result(tmp_path, again, made_steps=False)
    assert left() == again
    longer = {"steps": 20, "ms_per_step": None}  # killed between its last checkpoint and its result
    write_result(tmp_path, longer, made_steps=False)
    assert left() == longer
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_a_disk_that_takes_no_failure_raises_none(tmp_path: Path) -> None:
    """The failure comes before the file that reports it."""
    (tmp_path / failure_file.NAME).mkdir()
    assert not failure_file.write(tmp_path, {"status": 2, "message": "the disk is full"})
    assert [path.name for path in tmp_path.iterdir()] == [failure_file.NAME]
