"""From samples to a batch, by torch's default_collate or the callable of `data.collate`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from trainer.errors import UserError, on_one_line

Collate = Callable[[list[Any]], Any]
_UNEQUAL = (
    "have all samples be tensors, numbers or text of the same shape, or fill them up with "
    "'data.collate={_target_: trainer.data.padding.Padding}'"
)


def collated_batch(fetched: Any, dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """What `__getitems__` returned as a batch: torch lets it return a list of samples or a batch.

    Raises:
        UserError: it is a batch, and `collate` is not torch's; or as `collated`.
    """
    if isinstance(fetched, list):
        return collated(fetched, dataset, indices, collate)
    if collate is not default_collate:
        raise UserError(
            f"data.collate makes batches of samples, but {name_of(dataset)}.__getitems__ returns whole "
            "batches; have it return a list of samples, or set data.collate=null"
        )
    return fetched


def collated(samples: list[Any], dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """The batch of `samples`.

    Raises:
        UserError: `collate` fails, or returns nothing; names the first sample for which it fails with the
            first of the batch.
    """
    try:
        batch = collate(samples)
    except Exception as error:
        way_out = "it was raised by data.collate" if collate is not default_collate else _UNEQUAL
        for index, sample in zip(indices, samples, strict=False):
            try:
                collate([samples[0], sample])
            except Exception as of_pair:
                beside = "" if index == indices[0] else f" with {sample_name(dataset, indices[0])}"
                raise UserError(
                    f"{sample_name(dataset, index)} cannot be in a batch{beside}: "
                    f"{on_one_line(of_pair)}; {way_out}"
                ) from error
        raise
    if batch is None:
        raise UserError("data.collate returns None; have it return the batch")
    return batch


def sample_name(dataset: Any, index: int) -> str:
    """The sample in words; of a mixture, as that of its own dataset."""
    if hasattr(dataset, "origin_of_sample"):
        return sample_name(*dataset.origin_of_sample(index))
    return f"sample {index} of {name_of(dataset)}"


def name_of(dataset: Any) -> str:
    """The name of the dataset's class, without the wrappers that settings put around it."""
    return getattr(dataset, "class_name", type(dataset).__name__)
