"""Gathering of rows on rank 0: each sample once, in the dataset's order, at any world size."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.data.settings import eval_loader
from tests.ranks import run_ranks
from trainer.distributed.gather_samples import SampleGather
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError

COLUMNS = {"label": torch.int64, "right": torch.bool, "score": torch.bfloat16, "nothing": torch.float32}
COLUMNS |= {"number": torch.uint16, "wave": torch.complex64}  # not supported by pickle; conjugated


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise OSError("broken")
        return torch.tensor([index, index / 2]), index


def _ranks() -> Ranks:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts = (0,) * world_size
    return Ranks(rank, rank, world_size, world_size, hosts, torch.device("cpu"), "gloo")


def _gathered() -> tuple[list[int], dict[str, torch.Tensor]] | None:
    here = _ranks()
    loader = eval_loader(Numbers(), 4, here.world_size, here.rank, on_bad_sample="skip")
    gather = SampleGather(here, "Mine.rows")
    of_all = []
    for (values, labels), indices in loader:
        rows = {"score": values.bfloat16(), "label": labels, "right": labels % 3 == 0}
        rows["nothing"] = torch.zeros(len(labels), 0)
        rows |= {"number": labels.to(torch.uint16), "wave": (labels + 1j).conj()}
        of_all.append(gather(rows, indices))
    if not here.is_main:
        assert of_all == [None] * len(of_all)
        return None
    indices = [index for part, _ in of_all for index in part]
    return indices, {name: torch.cat([rows[name] for _, rows in of_all]) for name in COLUMNS}


def _differing() -> list[str]:
    here = _ranks()
    said = []
    width = torch.zeros(2, 1 + here.rank)
    for rows, indices in (({"a": width}, [0, 1]), ({"a": torch.zeros(3)}, [0, 1])):
        with pytest.raises(UserError) as raised:
            SampleGather(here, "Mine.rows")(rows, indices)
        said.append(str(raised.value))
    gather = SampleGather(here, "Mine.rows")
    gather({"a": torch.zeros(2)}, [0, 1])
    with pytest.raises(UserError) as raised:
        gather({"a": torch.zeros(2).double()}, [2, 3])
    return [*said, str(raised.value)]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_sample_is_gathered_once_and_in_order(world_size: int) -> None:
    (indices, rows), *others = run_ranks(_gathered, world_size)
    expected = [index for index in range(19) if index != 7]
    assert others == [None] * (world_size - 1)
    assert indices == rows["label"].tolist() == expected
    assert rows["right"].tolist() == [index % 3 == 0 for index in expected]
    assert rows["score"].float().tolist() == [[index, index / 2] for index in expected]
    assert rows["number"].tolist() == expected and rows["wave"].tolist() == [index - 1j for index in expected]
    assert {name: column.dtype for name, column in rows.items()} == COLUMNS


def test_rows_with_different_layouts_raise() -> None:
    for said in run_ranks(_differing, 2):
        for message, words in zip(
            said,
            (
                r"rank 1 .* differs from rank 0 in the rows of Mine\.rows: .*\(2,\).*; rows must have .*; pad them",
                r"Mine\.rows returned a as a tensor of shape \(3,\), but must return a tensor with one row for each of the 2 samples",
                r"returned .*float64.*, but .*float32.* in the previous batch",
            ),
            strict=True,
        ):
            assert re.search(words, message)
