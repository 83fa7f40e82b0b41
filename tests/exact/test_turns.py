"""A check that reads a few parts of a model in each pass finds what changes in some passes only."""

import pytest

from trainer.exact.turns import Turns


@pytest.mark.parametrize(("num_parts", "interval"), [(1, 4), (12, 4), (8, 1)])
def test_what_changes_at_regular_intervals_is_read(num_parts: int, interval: int) -> None:
    num_passes = 200 * num_parts * interval
    first, second = Turns(num_parts, interval), Turns(num_parts, interval)
    drawn = [list(first.next()) for _ in range(num_passes)]
    assert drawn == [list(second.next()) for _ in range(num_passes)], "ranks would compare different parts"
    assert drawn[:3] == [list(range(num_parts))] * 3
    later = drawn[3:]
    assert sum(map(len, later)) == pytest.approx(len(later) / interval, rel=0.01)
    for period in range(1, 9):
        for phase in range(period):
            read = {part for parts in later[phase::period] for part in parts}
            assert read == set(range(num_parts)), (period, phase)


def test_of_no_parts_none_is_read() -> None:
    turns = Turns(0)
    assert not any(turns.next() for _ in range(9))
