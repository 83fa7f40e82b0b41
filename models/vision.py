"""Any classifier of torchvision by name, with its stem adapted to small and to grey images."""

import difflib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Families whose stem is a convolution of stride 2, which can have stride 1, then a max-pool.
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


def vision(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    weights: str | None = None,
    download: bool = False,
) -> nn.Module:
    """Return torchvision's classifier ``name``, untrained: (B, *input_shape) -> (B, num_classes).

    With ``weights``, one of torchvision's names for them, the attribute ``pretrained`` locates their file,
    and the trainer starts from it. No weights are read here.

    Below 64 pixels the stem keeps the resolution: its convolution becomes 3x3 with stride 1 and the max-pool
    is removed (K. He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2, for
    CIFAR-10). With other than three channels only that convolution changes. Parameter names do not.

    Raises:
        ValueError: not a classifier of torchvision, one for larger images, or unknown weights.
    """
    import torchvision.models as zoo  # takes seconds, which other models save

    names = zoo.list_models(module=zoo)
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(f"name={name} is not a classifier of torchvision; choose from {', '.join(near)}")
    channels, height, width = input_shape
    family = next((prefix for prefix in SMALL_STEMS if name.startswith(prefix)), None)
    small = min(height, width) < SMALL_BELOW
    least = 75 if name == "inception_v3" else SMALL_BELOW
    if family is None and min(height, width) < least:
        raise ValueError(
            f"name={name} needs images of at least {least} pixels, not {height}x{width}; for less use "
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
    if weights is not None:
        known = zoo.get_model_weights(name).__members__
        if weights not in known:
            raise ValueError(f"weights={weights} are not known of {name}; there is {', '.join(known)}")
        model.pretrained = partial(_pretrained, known[weights].url, download)  # type: ignore[assignment]
    return model


def _pretrained(url: str, download: bool) -> Path:
    """The file of weights in torch's cache, downloaded if necessary.

    Raises:
        ValueError: it is not there, and cannot or may not be downloaded.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / url.rpartition("/")[2]
    if file.exists():
        return file
    if not download:
        raise ValueError(f"{file} is not there; model.download=true fetches it from {url}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(file), file.stem.rpartition("-")[2], progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash differs from the one in the name
        raise ValueError(f"{url} cannot be downloaded: {error}") from error
    return file


def _shape(convolution: nn.Conv2d) -> dict[str, Any]:
    return {key: getattr(convolution, key) for key in ("kernel_size", "stride", "padding")}


def _options(name: str, height: int, width: int) -> dict[str, Any]:
    """Arguments that some constructors need."""
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}  # one output, like the others
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
