"""Transforms that the settings add to a dataset."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from trainer.data.loading.reader import name_of, sample_of
from trainer.errors import UserError
from trainer.tensors.generators import generators_kept
from trainer.tensors.nested import leaves


class Transformed(Dataset[Any]):
    """A dataset whose samples are transformed by `transforms`, such as those of torchvision.transforms.v2.

    In a tuple or dict, they transform the PIL image or tv_tensor or, if there is neither, the first tensor.
    Random numbers are determined by the seed, the epoch and the index, as for any dataset. The attributes of
    `dataset`, such as num_classes and mean, are available.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[..., Any]], setting: str) -> None:
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"{setting} is not supported with {type(dataset).__name__}, because it is a stream; "
                f"transform the samples in the stream, and set {setting}=null"
            )
        from torchvision.transforms import v2  # takes half a second

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
                f"{self._setting} must return a tensor for each sample of {type(self.dataset).__name__}, but "
                f"a sample contains {', '.join(type(value).__name__ for value in values)}; add "
                "{_target_: torchvision.transforms.v2.PILToTensor} as the last transform"
            )
        return shapes[0]
