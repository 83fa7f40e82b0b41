"""Any classifier of torchvision by its name, its stem fitted to small and to grey images."""

import difflib
from collections.abc import Sequence
from typing import Any

from torch import nn

# Families whose stem, a convolution of stride 2, can as well have stride 1; and the max-pool behind it.
SMALL_STEMS = {
    "resnet": "maxpool",
    "resnext": "maxpool",
    "wide_resnet": "maxpool",
    "shufflenet": "maxpool",
    "densenet": "features.pool0",
    "mobilenet": None,
    "efficientnet": None,
    "mnasnet": None,
    "regnet": None,
}
SMALL_BELOW = 64  # pixels on the shorter side


def vision(name: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return torchvision's classifier ``name``, untrained: (B, *input_shape) -> (B, num_classes).

    Below 64 pixels the stem keeps the resolution: its convolution becomes 3x3 with stride 1 and the max-pool
    goes (K. He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2, for CIFAR-10). With
    other than three channels only that convolution changes. Parameter names stay torchvision's.

    Raises:
        ValueError: not a classifier of torchvision, or one for larger images.
    """
    import torchvision.models as zoo  # seconds, which runs with other models need not spend

    names = zoo.list_models(module=zoo)
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(f"name={name} is not a classifier of torchvision; there is {', '.join(near)}")
    channels, height, width = input_shape
    family = next((prefix for prefix in SMALL_STEMS if name.startswith(prefix)), None)
    small = min(height, width) < SMALL_BELOW
    least = 75 if name == "inception_v3" else SMALL_BELOW
    if family is None and min(height, width) < least:
        raise ValueError(
            f"name={name} needs images of at least {least} pixels, not {height}x{width}; smaller ones suit "
            f"torchvision's {', '.join(SMALL_STEMS)}"
        )

    model: nn.Module = zoo.get_model(
        name, weights=None, num_classes=num_classes, **_options(name, height, width)
    )
    if small or channels != 3:
        stem, old = next((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d))
        shape = {"kernel_size": 3, "stride": 1, "padding": 1} if small else _shape(old)
        new = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **shape)
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        model.set_submodule(stem, new)
    if small and family is not None and (pool := SMALL_STEMS[family]) is not None:
        model.set_submodule(pool, nn.Identity())
    return model


def _shape(convolution: nn.Conv2d) -> dict[str, Any]:
    return {key: getattr(convolution, key) for key in ("kernel_size", "stride", "padding")}


def _options(name: str, height: int, width: int) -> dict[str, Any]:
    """What some constructors must be told."""
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}  # one output, as the others
    if name.startswith("maxvit"):
        return {"input_size": (height, width)}
    if name.startswith("vit"):
        patch = int(name.rsplit("_", 1)[1])
        if height != width or height % patch:
            raise ValueError(
                f"name={name} needs square images of a multiple of {patch} pixels, not {height}x{width}"
            )
        return {"image_size": height}
    return {}
