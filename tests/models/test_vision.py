"""The stem of each family with small and with grey images, forward and backward."""

import pytest
import torch
from torch import nn

from models.vision import SMALL_STEMS, vision

FAMILIES = {
    "resnet": "resnet18",
    "resnext": "resnext50_32x4d",
    "wide_resnet": "wide_resnet50_2",
    "shufflenet": "shufflenet_v2_x0_5",
    "densenet": "densenet121",
    "mobilenet": "mobilenet_v3_small",
    "efficientnet": "efficientnet_b0",
    "mnasnet": "mnasnet0_5",
    "regnet": "regnet_y_400mf",
}


def stem_resolution(model: nn.Module, side: int, channels: int) -> int:
    """Return the side of the images in the second convolution."""
    sides: list[int] = []
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    handle = convolutions[1].register_forward_pre_hook(lambda _, inputs: sides.append(inputs[0].shape[-1]))
    with torch.no_grad():
        model.eval()(torch.zeros(1, channels, side, side))
    handle.remove()
    return sides[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "input_shape"), [*((family, (1, 8, 8)) for family in SMALL_STEMS), ("resnet", (3, 32, 32))]
)
def test_the_stem_keeps_the_size_of_small_images(family: str, input_shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = vision(FAMILIES[family], input_shape, 7)
    logits = model(torch.randn(2, *input_shape))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert stem_resolution(model, input_shape[1], input_shape[0]) == input_shape[1]


@pytest.mark.slow
def test_large_images_use_torchvisions_stem() -> None:
    model = vision("resnet18", (3, 64, 64), 10)
    assert stem_resolution(model, 64, 3) == 16
    assert model.conv1.kernel_size == (7, 7)
    assert vision("resnet18", (1, 64, 64), 10).conv1.weight.shape == (64, 1, 7, 7)


@pytest.mark.parametrize(
    ("name", "side", "message"),
    [
        ("resnet19", 32, "name=resnet19 is not a classifier of torchvision; did you mean resnet"),
        ("fasterrcnn_resnet50_fpn", 224, "is not a classifier"),
        ("vgg16", 32, "name=vgg16 needs images of at least 64 pixels, got 32x32"),
        ("inception_v3", 64, "name=inception_v3 needs images of at least 75 pixels, got 64x64"),
        ("vit_b_16", 100, "name=vit_b_16 needs square images whose side is a multiple of 16, got 100x100"),
    ],
)
def test_mistakes_are_named(name: str, side: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vision(name, (3, side, side), 10)
