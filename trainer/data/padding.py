"""A collate function for samples of unequal sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer.errors import UserError

Number = int | float


class Padding:
    """A `data.collate` that pads tensors of unequal sizes at the end of each dimension.

    A sample is a tensor or NumPy array, or a tuple, list or dict of these and of values that default_collate
    accepts. Each field is padded to its largest size in the batch, so micro-batches may differ in size.

    Args:
        fill: the padding value for all fields, or values by position or key, with 0 for other fields. Use
            -100 for labels: the tasks of this project ignore that label.
        multiple_of: sizes are rounded up to a multiple of this number.

    Raises:
        UserError: `multiple_of` is not an integer of at least 1.
    """

    def __init__(
        self, fill: Number | Sequence[Number] | Mapping[str, Number] = 0, multiple_of: int = 1
    ) -> None:
        if not isinstance(multiple_of, int) or multiple_of < 1:
            raise UserError(f"data.collate.multiple_of={multiple_of}: expected an integer of at least 1")
        self._fill, self._multiple = fill, multiple_of

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch: a tensor, a dict, or, for samples that are tuples or lists, a list."""
        kind = type(samples[0])
        fields = [_fields(sample) for sample in samples]
        if any(sample.keys() != fields[0].keys() for sample in fields):
            raise UserError(f"samples differ in their fields: {sorted({str(list(s)) for s in fields})}")
        fills = self._fills(fields[0])
        batch = {name: self._padded([s[name] for s in fields], fills.get(name, 0)) for name in fields[0]}
        if issubclass(kind, Mapping):
            return batch
        return list(batch.values()) if issubclass(kind, tuple | list) else batch[0]

    def _fills(self, fields: Mapping[Any, Any]) -> Mapping[Any, Number]:
        if isinstance(self._fill, int | float):
            return dict.fromkeys(fields, self._fill)
        fills = _fields(self._fill)
        if not fills.keys() <= fields.keys():
            raise UserError(f"data.collate.fill={self._fill}, but the fields of a sample are {[*fields]}")
        return fills

    def _padded(self, values: list[Any], fill: Number) -> Any:
        if not isinstance(values[0], Tensor | np.ndarray):
            return default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        if len({(tensor.ndim, tensor.dtype) for tensor in tensors}) > 1:
            kinds = sorted({f"{tensor.ndim} dimensions of {tensor.dtype}" for tensor in tensors})
            raise UserError(f"samples differ in dimensions or dtype: {', '.join(kinds)}")
        largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        sizes = [-(-size // self._multiple) * self._multiple for size in largest]
        batch = tensors[0].new_full((len(tensors), *sizes), fill)
        for row, tensor in zip(batch, tensors, strict=True):
            row[tuple(map(slice, tensor.shape))] = tensor
        return batch


def _fields(sample: Any) -> dict[Any, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    return dict(enumerate(sample)) if isinstance(sample, tuple | list) else {0: sample}
