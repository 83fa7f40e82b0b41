"""metrics.jsonl: whole lines, one for each step; those of steps that a resumed run repeats are removed."""

import json
import math
from pathlib import Path

from trainer.run_dir.metrics_file import FILE, MetricsFile, read_metrics


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


def test_one_line_per_step_also_if_written_in_two_parts(tmp_path: Path) -> None:
    scalars = MetricsFile(tmp_path, steps_before=0)
    scalars.write({"train/loss": 0.5}, 10)
    scalars.write({"train/loss": 0.25}, 20)
    scalars.write({"eval/loss": 0.75}, 20)
    scalars.write({"train/loss": math.nan}, 30)
    assert lines(tmp_path) == [
        {"step": 10, "train/loss": 0.5},
        {"step": 20, "train/loss": 0.25, "eval/loss": 0.75},
        {"step": 30, "train/loss": None},
    ]
    read = read_metrics(tmp_path)
    assert math.isnan(read["train/loss"].pop(30))
    assert read == {"train/loss": {10: 0.5, 20: 0.25}, "eval/loss": {20: 0.75}}
    scalars.close()


def test_a_resumed_run_repeats_later_steps(tmp_path: Path) -> None:
    before = MetricsFile(tmp_path, steps_before=0)
    for step in (10, 20, 30):
        before.write({"train/loss": 1.0}, step)
    before.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 40, "train/lo')  # killed during a write
    assert read_metrics(tmp_path) == {"train/loss": {10: 1.0, 20: 1.0, 30: 1.0}}
    for steps, is_kept in ((20, True), (30, False)):  # 30: of the steps that are about to be repeated
        (tmp_path / "result.json").write_text(json.dumps({"steps": steps}))
        MetricsFile(tmp_path, steps_before=20).close()
        assert (tmp_path / "result.json").exists() == is_kept
    after = MetricsFile(tmp_path, steps_before=20)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
    after.write({"train/loss": 2.0}, 30)
    after.close()
    assert [line["train/loss"] for line in lines(tmp_path)] == [1.0, 1.0, 2.0]
