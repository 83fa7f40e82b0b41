"""A folder of images for each class, as ImageNet comes."""

import warnings
from pathlib import Path

import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

from trainer.data.images import check_split
from trainer.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


class ImageFolder(datasets.ImageFolder):
    """``root/train/<class>/*`` and ``root/val/<class>/*``, or ``root/eval``.

    Images come normalised, (3, image_size, image_size). Training takes a random crop of 8 to 100 % of the
    area and mirrors every other image; evaluation takes the centre, 7/8 of the shorter side.

    Raises:
        UserError: a folder missing, empty, or with other classes than the training folder; OSError when an
            image that cannot be decoded, or is too large to be one in good faith, is fetched.
    """

    def __init__(self, split: str, root: str, image_size: int = 224) -> None:
        check_split(split)
        if image_size < 1:
            raise UserError(f"data.dataset.image_size={image_size} is not at least 1")
        last = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        if split == "train":
            first = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
        else:
            first = [v2.Resize(round(image_size * 8 / 7)), v2.CenterCrop(image_size)]
        folder = _folder_of(split, Path(root))
        try:
            super().__init__(folder, transform=v2.Compose(first + last), loader=read_rgb)
            train_classes, _ = self.find_classes(Path(root, "train"))
        except FileNotFoundError as error:
            raise UserError(f"data.dataset.root={root}: {error}") from error
        if self.classes != train_classes:  # a class's number is its place among the sorted names
            odd = sorted(set(self.classes) ^ set(train_classes))
            raise UserError(
                f"{folder} and {Path(root, 'train')} must hold the same classes, but {len(odd)} are in "
                f"one of them only: {', '.join(odd[:5])}"
            )
        self.num_classes = len(self.classes)
        self.input_shape = (3, image_size, image_size)


def _folder_of(split: str, root: Path) -> Path:
    candidates = [root / name for name in (("train",) if split == "train" else ("val", "eval"))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(
        f"data.dataset.root={root}: no folder {' or '.join(map(str, candidates))}, with one for each class"
    )


def read_rgb(path: str) -> Image.Image:
    """Decode the whole image.

    Raises:
        OSError: naming the path, whatever it was that the decoder stumbled over; also for an image of more
            than ``PIL.Image.MAX_IMAGE_PIXELS``, which could be a decompression bomb.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return image.convert("RGB")
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
