"""Chooses the loader for a dataset, read by index or a stream; other code need not know which it is."""

from typing import Any

from trainer.data.loading.base import EvalLoader, LoaderSettings, Share, TrainLoader
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.collation import name_of
from trainer.data.loading.index_loader import IndexEvalLoader, IndexTrainLoader
from trainer.data.loading.stream_loader import StreamEvalLoader, StreamTrainLoader
from trainer.data.order import Order, shuffled
from trainer.data.stream import is_stream
from trainer.errors import UserError


def train_loader(
    dataset: Any, settings: LoaderSettings, batch: BatchSplit, share: Share, order: Order = shuffled
) -> TrainLoader:
    """The loader for this kind of data; `order` is for data that is read by index.

    Raises:
        UserError: fewer samples than a global batch, or a setting that this kind of data does not support.
    """
    _check_kind(dataset, settings)
    if not is_stream(dataset):
        return IndexTrainLoader(dataset, settings, batch, share, order)
    if order is not shuffled:
        raise UserError(
            f"data.order is for data that is read by index, but {type(dataset).__name__} is a stream, which "
            "has an order of its own; set it to null"
        )
    return StreamTrainLoader(dataset, settings, batch, share)


def eval_loader(dataset: Any, settings: LoaderSettings, batch: BatchSplit, share: Share) -> EvalLoader:
    """As `train_loader`. Raises UserError: the data is empty, or a setting does not apply."""
    _check_kind(dataset, settings)
    kind = StreamEvalLoader if is_stream(dataset) else IndexEvalLoader
    return kind(dataset, settings, batch, share)


def _check_kind(dataset: Any, settings: LoaderSettings) -> None:
    if not is_stream(dataset):
        try:
            len(dataset)
        except TypeError as error:
            raise UserError(
                f"{name_of(dataset)} has __getitem__, but no __len__ that says how many samples there are "
                f"({error}); write one, or have it yield samples as a torch.utils.data.IterableDataset"
            ) from error
    if settings.sharded and not is_stream(dataset):
        raise UserError(
            f"data.sharded is true, but {type(dataset).__name__} is not a stream: it is read by index, in a "
            "new order each epoch; set it to false"
        )
    if settings.on_bad_sample == "skip" and is_stream(dataset):
        raise UserError(
            f"data.on_bad_sample is skip, but {type(dataset).__name__} is a stream, which has to leave out "
            "by itself what it cannot read; set it to raise"
        )
