"""A dataset of Hugging Face's `datasets`, read as a stream: local files, or a dataset of the hub."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from trainer.data.images import check_split
from trainer.errors import UserError, on_one_line


def hugging_face(
    split: str,
    path: str,
    columns: Sequence[str] | None = None,
    splits: dict[str, str] | None = None,
    shuffle_buffer: int = 0,
    **options: Any,
) -> "HubStream":
    """The rows of ``datasets.load_dataset(path, streaming=True, **options)``, numbers and images as tensors.

    Args:
        path: the name of a dataset, or of a kind of files: json, csv, parquet, text, imagefolder, ...
        columns: the columns to take of each row, as a tuple; None: all, as a dict.
        splits: the dataset's names for our splits, such as {eval: validation}.
        shuffle_buffer: the number of rows of training data held in memory to draw from. Checkpoints do not
            hold the buffer: a resumed run reads all rows up to where it stopped, and draws the same.
        options: further arguments, such as data_files={train: ..., eval: ...}.

    Raises:
        UserError: `datasets` is not installed, or cannot load the data.
    """
    check_split(split)
    try:
        import datasets
    except ImportError:
        raise UserError("data=hugging_face needs: pip install 'ringmaster-trainer[datasets]'") from None
    theirs = (splits or {}).get(split, split)
    try:
        rows = datasets.load_dataset(path, split=theirs, streaming=True, **options)
        if columns is not None:
            rows = rows.select_columns(list(columns))
    except Exception as error:  # each kind of file and hub raises its own
        raise UserError(
            f"datasets.load_dataset({path!r}, split={theirs!r}) cannot be read: {on_one_line(error)}"
        ) from error
    rows = rows.with_format("torch")
    if shuffle_buffer and split == "train":
        return HubStream(rows.shuffle(seed=0, buffer_size=shuffle_buffer), columns, has_state=False)
    return HubStream(rows, columns, has_state=True)


class HubStream(IterableDataset[Any]):
    """A streaming dataset with the methods of ``trainer.data.stream.Stream``.

    Args:
        has_state: whether it resumes where it stopped without reading what came before.

    Attributes:
        num_classes: of a column of class labels, if there is one.
    """

    def __init__(self, rows: Any, columns: Sequence[str] | None, has_state: bool) -> None:
        self.rows, self.columns, self._has_state = rows, columns, has_state
        if has_state:
            self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict
        self.num_shards: int = rows.num_shards
        features = rows.features or {}  # unknown for some kinds of files
        for name in columns or features:
            if (number := getattr(features.get(name), "num_classes", None)) is not None:
                self.num_classes: int = number

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def decode(self, row: dict[str, Any]) -> Any:
        return row if self.columns is None else tuple(row[name] for name in self.columns)

    def shard(self, num_shards: int, index: int) -> "HubStream":
        return HubStream(self.rows.shard(num_shards, index), self.columns, self._has_state)
