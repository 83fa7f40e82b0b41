"""Batches of samples of unequal sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer.errors import UserError

Number = int | float


class Padding:
    """A `data.collate` that fills up tensors of unequal sizes, at the end of each dimension.

    A sample is a tensor or NumPy array, or a tuple, list or dict of such and of what default_collate takes.
    Each field of the batch is as large as its largest sample, so micro-batches may differ in size.

    Args:
        fill: the value of what is filled up: one for all fields, or by position or key, where a field that
            is not named gets 0. The tasks of this project do not count labels of -100.
        multiple_of: sizes are rounded up to a multiple of it.
    """

    def __init__(
        self, fill: Number | Sequence[Number] | Mapping[str, Number] = 0, multiple_of: int = 1
    ) -> None:
        if not isinstance(multiple_of, int) or multiple_of < 1:
            raise UserError(f"data.collate.multiple_of is {multiple_of}, but must be an integer, at least 1")
        self._fill, self._multiple = fill, multiple_of

    def __call__(self, samples: list[Any]) -> Any:
        """The batch: of a tuple or list of fields a list, of a dict a dict.

        Raises:
            UserError: `fill` names a field that samples lack, or samples have other fields or dimensions.
        """
        kind = type(samples[0])
        fields = [_fields(sample) for sample in samples]
        if any(of_one.keys() != fields[0].keys() for of_one in fields):
            raise UserError(f"samples have other fields: {sorted({str(list(one)) for one in fields})}")
        fills = self._fills(fields[0])
        batch = {name: self._filled([one[name] for one in fields], fills.get(name, 0)) for name in fields[0]}
        if issubclass(kind, Mapping):
            return batch
        return list(batch.values()) if issubclass(kind, tuple | list) else batch[0]

    def _fills(self, fields: Mapping[Any, Any]) -> Mapping[Any, Number]:
        if isinstance(self._fill, int | float):
            return dict.fromkeys(fields, self._fill)
        fills = _fields(self._fill)
        if not fills.keys() <= fields.keys():
            raise UserError(f"data.collate.fill is {self._fill}, but the fields of a sample are {[*fields]}")
        return fills

    def _filled(self, values: list[Any], fill: Number) -> Any:
        if not isinstance(values[0], Tensor | np.ndarray):
            return default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        if len({(tensor.ndim, tensor.dtype) for tensor in tensors}) > 1:
            found = sorted({f"{tensor.ndim} dimensions of {tensor.dtype}" for tensor in tensors})
            raise UserError(f"samples differ in more than their sizes: {', '.join(found)}")
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
