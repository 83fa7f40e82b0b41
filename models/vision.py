"""torchvision's classifiers by name, adapted to small images and to any number of channels."""

import difflib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Families whose stem is a convolution of stride 2, which can be changed to 1, and their max-pool's name.
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
SMALL_BELOW = 64  # pixels of the shorter side


def vision(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    weights: str | None = None,
    download: bool = False,
) -> nn.Module:
    """Return torchvision's classifier ``name``, which maps (B, *input_shape) to logits (B, num_classes).

    For images smaller than 64 pixels, the stem keeps the resolution: a 3x3 convolution with stride 1 replaces
    its convolution, and the max-pool is removed. For larger images whose number of channels is not three,
    only the convolution is replaced. The names of parameters do not change.

    Args:
        weights: the name of pretrained weights in torchvision. The model's attribute ``pretrained`` then
            locates their file, from which the trainer starts; this function does not read it.
        download: whether ``pretrained`` may download the file.

    Raises:
        ValueError: ``name`` or ``weights`` is unknown, or the images are too small for this classifier.

    Source of the stem: K. He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2.
    """
    import torchvision.models as zoo  # takes seconds

    names = zoo.list_models(module=zoo)
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(f"name={name} is not a classifier of torchvision; did you mean {', '.join(near)}?")
    channels, height, width = input_shape
    family = next((prefix for prefix in SMALL_STEMS if name.startswith(prefix)), None)
    small = min(height, width) < SMALL_BELOW
    least = 75 if name == "inception_v3" else SMALL_BELOW
    if family is None and min(height, width) < least:
        raise ValueError(
            f"name={name} needs images of at least {least} pixels, got {height}x{width}; for smaller images "
            f"use a model of {', '.join(SMALL_STEMS)}"
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
            raise ValueError(f"weights={weights}: expected one of {', '.join(known)} for {name}")
        model.pretrained = partial(_pretrained, known[weights].url, download)  # type: ignore[assignment]
    return model


def _pretrained(url: str, download: bool) -> Path:
    """Return the path of a weights file in torch's cache, after downloading it if necessary.

    Raises:
        ValueError: the file is missing, and `download` is False or the download fails.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / url.rpartition("/")[2]
    if file.exists():
        return file
    if not download:
        raise ValueError(f"{file} does not exist; set model.download=true to download it from {url}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(file), file.stem.rpartition("-")[2], progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash is wrong
        raise ValueError(f"failed to download {url}: {error}") from error
    return file


def _shape(convolution: nn.Conv2d) -> dict[str, Any]:
    return {key: getattr(convolution, key) for key in ("kernel_size", "stride", "padding")}


def _options(name: str, height: int, width: int) -> dict[str, Any]:
    if name in ("googlenet", "inception_v3"):
        return {
            "aux_logits": False,
            "init_weights": True,
        }  # with auxiliary logits there would be several outputs
    if name.startswith("maxvit"):
        return {"input_size": (height, width)}
    if name.startswith("vit"):
        patch = int(name.rsplit("_", 1)[1])
        if height != width or height % patch:
            raise ValueError(
                f"name={name} needs square images whose side is a multiple of {patch}, got {height}x{width}"
            )
        return {"image_size": height}
    return {}
