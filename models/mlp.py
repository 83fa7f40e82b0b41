"""A multi-layer perceptron."""

import itertools
import math
from collections.abc import Sequence

from torch import nn


class MLP(nn.Sequential):
    """A multi-layer perceptron, which maps (B, *input_shape) to logits (B, num_classes).

    Args:
        input_shape: shape of a sample, which is flattened.
        num_classes: number of outputs.
        hidden: widths of the hidden layers, each followed by a ReLU; ``()`` is a linear classifier.

    Raises:
        ValueError: a width is below 1.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (256, 256)
    ) -> None:
        widths = [math.prod(input_shape), *hidden, num_classes]
        if min(widths) < 1:
            raise ValueError(
                f"the width of every layer must be at least 1, got input_shape={list(input_shape)}, "
                f"hidden={list(hidden)}, num_classes={num_classes}"
            )
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in itertools.pairwise(widths[:-1]):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-2], num_classes))

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]
