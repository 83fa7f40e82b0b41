"""A dataset of Hugging Face's `datasets`, read as a stream: local files, or a dataset of the hub."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trainer.data.images import check_at_least_one, check_split
from trainer.errors import UserError, on_one_line, optional


def hugging_face(
    split: str,
    path: str,
    columns: Sequence[str] | None = None,
    splits: dict[str, str] | None = None,
    shuffle_buffer: int = 0,
    map: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    pack: int | None = None,
    **options: Any,
) -> "HubStream":
    """The rows of ``datasets.load_dataset(path, streaming=True, **options)``, numbers and images as tensors.

    Args:
        path: the name of a dataset, or of a kind of files: json, csv, parquet, text, imagefolder, ...
        columns: the columns to take of each row, as a tuple; None: all, as a dict.
        splits: the dataset's names for our splits, such as {eval: validation}.
        shuffle_buffer: the number of rows of training data held in memory to draw from. Checkpoints do not
            hold the buffer: a resumed run reads all rows up to where it stopped, and draws the same.
        map: makes of a row, as plain values, the dict that takes its place, such as a tokenizer's.
        pack: tokens of a sample: the ``input_ids`` of all rows are put together, and cut into samples of this
            length, without padding. Each is a dict of input_ids and labels, which are equal. What is left at
            the end of an epoch is dropped. Let ``map`` end each text with a token that says so.
        options: further arguments, such as data_files={train: ..., eval: ...}.

    Raises:
        UserError: `datasets` is not installed, or cannot load the data.
    """
    check_split(split)
    datasets = optional("datasets", "data=hugging_face")
    theirs = (splits or {}).get(split, split)
    try:
        rows = datasets.load_dataset(path, split=theirs, streaming=True, **options)
        if columns is not None and map is None and pack is None:
            rows = rows.select_columns(list(columns))
    except Exception as error:  # each kind of file and hub raises its own
        raise UserError(
            f"datasets.load_dataset({path!r}, split={theirs!r}) cannot be read: {on_one_line(error)}"
        ) from error
    if map is None and pack is None:
        rows = rows.with_format("torch")
    check_at_least_one(pack=pack)
    if is_drawn := shuffle_buffer > 0 and split == "train":
        rows = rows.shuffle(seed=0, buffer_size=shuffle_buffer)
    return HubStream(rows, columns, not is_drawn, map, pack)


class HubStream(IterableDataset[Any]):
    """A streaming dataset with the methods of ``trainer.data.stream.Stream``.

    Args:
        has_state: whether it resumes where it stopped without reading what came before.
        map, pack: see `hugging_face`.

    Attributes:
        num_classes: of a column of class labels, if there is one.
    """

    def __init__(
        self,
        rows: Any,
        columns: Sequence[str] | None,
        has_state: bool,
        map: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        pack: int | None,
    ) -> None:
        self.rows, self.columns, self._has_state, self._map, self._pack = rows, columns, has_state, map, pack
        self._start = list[int]()  # what `rest` is where an epoch begins or is resumed
        self._rest, self._begin = list[int](), 0  # tokens of rows that were read; how many are given out
        if has_state:
            self.state_dict, self.load_state_dict = self._state, self._load
        self.num_shards: int = rows.num_shards
        features = rows.features or {}  # unknown for some kinds of files
        for name in columns or features:
            if (number := getattr(features.get(name), "num_classes", None)) is not None:
                self.num_classes: int = number

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows) if self._pack is None else self._windows(self._pack)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def decode(self, row: Any) -> Any:
        if self._pack is not None:
            row = {"input_ids": torch.tensor(row), "labels": torch.tensor(row)}
        elif self._map is not None:
            row = {name: _as_tensor(value) for name, value in self._mapped(row).items()}
        return row if self.columns is None else tuple(row[name] for name in self.columns)

    def shard(self, num_shards: int, index: int) -> "HubStream":
        rows = self.rows.shard(num_shards, index)
        return HubStream(rows, self.columns, self._has_state, self._map, self._pack)

    def _windows(self, size: int) -> Iterator[list[int]]:
        self._rest, self._begin, self._start = self._start, 0, []
        for row in self.rows:
            made = self._mapped(row)
            if "input_ids" not in made:
                raise UserError(
                    f"data.dataset.pack={size} puts input_ids together, but a row has {', '.join(made)}; let "
                    "data.dataset.map return them"
                )
            tokens = torch.as_tensor(made["input_ids"]).flatten().tolist()  # also (1, N) of a tokenizer
            self._rest, self._begin = [*self._rest[self._begin :], *tokens], 0
            while len(self._rest) - self._begin >= size:
                self._begin += size
                yield self._rest[self._begin - size : self._begin]

    def _mapped(self, row: Any) -> Mapping[str, Any]:
        made = row if self._map is None else self._map(row)
        if not isinstance(made, Mapping):
            raise UserError(
                f"data.dataset.map makes a {type(made).__name__} of a row, but must make a dict, such as "
                '{"input_ids": ...}'
            )
        return made

    def _state(self) -> dict[str, Any]:
        if self._pack is None:
            return self.rows.state_dict()
        return {"rows": self.rows.state_dict(), "rest": torch.tensor(self._rest[self._begin :])}

    def _load(self, state: dict[str, Any]) -> None:
        if self._pack is None:
            self.rows.load_state_dict(state)
            return
        self.rows.load_state_dict(state["rows"])
        self._start = self._rest = state["rest"].tolist()
        self._begin = 0


def _as_tensor(value: Any) -> Any:
    """Numbers and lists of them as tensors; a text stays, and so does a list of texts."""
    first = value[0] if isinstance(value, list) and value else value
    return torch.tensor(value) if isinstance(first, int | float | list) else value
