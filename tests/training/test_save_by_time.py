"""checkpoint.every_minutes: only the clock of rank 0 counts, and all ranks save after the same step."""

from pathlib import Path

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.step_vote import AfterStep, Agreed, StepVote


def _saved_by_the_clock(run_dir: Path) -> list[Agreed]:
    state, ranks = tiny.train_state(), tiny.facts()
    checkpointer = tiny.checkpointer(run_dir, state=state, every_minutes=5.0)
    agreement, found = StepVote(ranks), []
    for minutes in (4, 2, 4, 2):
        checkpointer._last_save_s -= 60 * minutes
        is_due = ranks.is_main and checkpointer.minutes_are_over()
        agreement.start((1.0,), AfterStep.SAVE if is_due else AfterStep.CONTINUE, True)
        found.append(agreement.result())
        state.progress.step += 1
        if found[-1].after is AfterStep.SAVE:
            checkpointer.save(state)
    return found


def test_all_ranks_save_when_every_minutes_has_passed_on_rank_0(tmp_path: Path) -> None:
    first, second = run_ranks(_saved_by_the_clock, 2, tmp_path)
    none, save = Agreed(2.0, AfterStep.CONTINUE, True), Agreed(2.0, AfterStep.SAVE, True)
    assert first == second == [none, save, none, save]
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000004"]
