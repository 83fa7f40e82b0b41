"""Transforms of samples that the settings add to a dataset."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from trainer.data.loading.reader import name_of, sample_of
from trainer.errors import UserError
from trainer.tensors.generators import generators_kept
from trainer.tensors.nested import leaves


class Transformed(Dataset[Any]):
    """Applies `transforms`, as those of torchvision's transforms.v2, to each sample that is read.

    In a tuple or dict they change the image: a PIL image, a tv_tensor or, without either, the first tensor.
    Their random numbers follow from (seed, epoch, index), as for any dataset. The dataset's attributes
    (num_classes, mean and the like) are its own, too.

    Args:
        setting: the setting that asked for it, for messages.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[..., Any]], setting: str) -> None:
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"{setting} is for data that is read by index; a stream transforms its own samples"
            )
        from torchvision.transforms import v2  # imported here, since it takes half a second

        self.dataset, self.class_name = dataset, name_of(dataset)
        self._transform, self._setting = v2.Compose(transforms), setting

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._transform(sample_of(self.dataset, index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "draw"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the first tensor in a transformed sample."""
        with generators_kept(of_accelerators=False):
            values = leaves(self[0])
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        if not shapes:
            raise UserError(
                f"{self._setting} must yield a tensor in each sample of {type(self.dataset).__name__}, but "
                f"{', '.join(type(value).__name__ for value in values)}; let it end with "
                "{_target_: torchvision.transforms.v2.PILToTensor}"
            )
        return shapes[0]
