"""Streaming datasets from Hugging Face's library `datasets`, from local files or the hub."""

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
    """Stream ``datasets.load_dataset(path, streaming=True, **options)``, with numbers and images as tensors.

    Args:
        split: train or eval.
        path: the name of a dataset, or a file format: json, csv, parquet, text, imagefolder, ...
        columns: the columns of each row to return, as a tuple; None returns all columns, as a dict.
        splits: the dataset's names for the splits train and eval, such as {eval: validation}.
        shuffle_buffer: number of rows of training data in the shuffle buffer; 0 does not shuffle. Checkpoints
            do not contain the buffer, so a resumed run reads all rows up to its position again.
        map: function that takes a row of plain values and returns a dict to replace it, such as a tokenizer.
        pack: tokens per sample. The ``input_ids`` of all rows, to which ``map`` should append an end-of-text
            token, are concatenated and cut into samples of this length. A sample is a dict of input_ids and
            labels, which have the same values. Tokens that remain at the end of an epoch are dropped.
        options: further arguments of ``load_dataset``, such as data_files={train: ..., eval: ...}.
    """
    check_split(split)
    datasets = optional("datasets", "data=hugging_face")
    dataset_split = (splits or {}).get(split, split)
    try:
        rows = datasets.load_dataset(path, split=dataset_split, streaming=True, **options)
        if columns is not None and map is None and pack is None:
            rows = rows.select_columns(list(columns))
    except Exception as error:  # formats and the hub raise many kinds of errors
        raise UserError(
            f"datasets.load_dataset({path!r}, split={dataset_split!r}) failed: {on_one_line(error)}"
        ) from error
    if map is None and pack is None:
        rows = rows.with_format("torch")
    check_at_least_one(pack=pack)
    if is_shuffled := shuffle_buffer > 0 and split == "train":
        rows = rows.shuffle(seed=0, buffer_size=shuffle_buffer)
    return HubStream(rows, columns, not is_shuffled, map, pack)


class HubStream(IterableDataset[Any]):
    """A streaming dataset with the methods of ``trainer.data.stream.Stream``."""

    def __init__(
        self,
        rows: Any,
        columns: Sequence[str] | None,
        has_state: bool,
        map: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        pack: int | None,
    ) -> None:
        # `has_state`: whether it can resume at a position without reading the rows before it
        self.rows, self.columns, self._has_state, self._map, self._pack = rows, columns, has_state, map, pack
        self._start = list[int]()  # the tokens in `_rest` at the start of an epoch, or at a resume
        self._rest, self._used = list[int](), 0  # tokens that were read; how many of them were returned
        if has_state:
            self.state_dict, self.load_state_dict = self._state, self._load
        self.num_shards: int = rows.num_shards
        features = rows.features or {}  # unknown for some file formats
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
        self._rest, self._used, self._start = self._start, 0, []
        for row in self.rows:
            mapped = self._mapped(row)
            if "input_ids" not in mapped:
                raise UserError(
                    f"data.dataset.pack={size} needs input_ids in each row, but a row has "
                    f"{', '.join(mapped)}; return input_ids from data.dataset.map"
                )
            tokens = torch.as_tensor(mapped["input_ids"]).flatten().tolist()  # a tokenizer may return (1, N)
            self._rest, self._used = [*self._rest[self._used :], *tokens], 0
            while len(self._rest) - self._used >= size:
                self._used += size
                yield self._rest[self._used - size : self._used]

    def _mapped(self, row: Any) -> Mapping[str, Any]:
        mapped = row if self._map is None else self._map(row)
        if not isinstance(mapped, Mapping):
            raise UserError(
                f"data.dataset.map returned a {type(mapped).__name__}, but must return a dict, such as "
                '{"input_ids": ...}'
            )
        return mapped

    def _state(self) -> dict[str, Any]:
        if self._pack is None:
            return self.rows.state_dict()
        return {"rows": self.rows.state_dict(), "rest": torch.tensor(self._rest[self._used :])}

    def _load(self, state: dict[str, Any]) -> None:
        if self._pack is None:
            self.rows.load_state_dict(state)
            return
        self.rows.load_state_dict(state["rows"])
        self._start = self._rest = state["rest"].tolist()
        self._used = 0


def _as_tensor(value: Any) -> Any:
    first = value[0] if isinstance(value, list) and value else value
    return torch.tensor(value) if isinstance(first, int | float | list) else value
