"""Images in one folder per class, the layout of ImageNet."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from trainer.data.images import check_at_least_one, check_split
from trainer.errors import UserError, first_few, is_retryable

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


class ImageFolder(datasets.ImageFolder):
    """Images in ``root/train/<class>/*`` and ``root/val/<class>/*`` (or eval), without hidden files.

    Images are uint8, (3, image_size, image_size), and are normalised on the device. A training image is a
    random crop of 8% to 100% of the area, randomly mirrored; a validation image is a centre crop whose side
    is 7/8 of the shorter side.

    Args:
        split: train or eval.
        root: the folder that contains train and val.
        image_size: in pixels; None returns whole PIL images, which ``data.train_transforms`` and
            ``data.eval_transforms`` must convert to tensors.

    Raises:
        UserError: a folder is missing or empty, or its classes differ from those of the training folder.
        OSError: on access, if an image cannot be decoded, or exceeds Pillow's size limit.
    """

    mean, std = MEAN, STD

    def __init__(self, split: str, root: str, image_size: int | None = 224) -> None:
        check_split(split)
        check_at_least_one(image_size=image_size)
        crop = _crop(split, image_size) if image_size is not None else None
        folder = _folder_of(split, Path(root))
        try:
            super().__init__(folder, crop, loader=read_rgb, is_valid_file=_is_image)
            train_classes, _ = self.find_classes(Path(root, "train"))
        except FileNotFoundError as error:
            raise UserError(f"data.dataset.root={root}: {error}") from error
        if self.classes != train_classes:  # a class's number is its index among the sorted names
            differing = sorted(set(self.classes) ^ set(train_classes))
            raise UserError(
                f"{folder} and {Path(root, 'train')} must contain the same classes, but {len(differing)} are "
                f"in only one of them: {first_few(differing)}"
            )
        self.num_classes = len(self.classes)
        if image_size is not None:
            self.input_shape = (3, image_size, image_size)

    @staticmethod
    def unlabelled(path: str, image_size: int | None = 224, **_: object) -> Any:
        """Read an image without a label, as for an evaluation; other arguments of the dataset are ignored."""
        image = read_rgb(path)
        return image if image_size is None else _crop("eval", image_size)(image)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the classes, ignoring hidden folders such as .ipynb_checkpoints."""
        names = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
        return names, {name: number for number, name in enumerate(names)}


def _is_image(path: str) -> bool:
    """Return whether `path` is an image and not hidden; macOS creates hidden files such as ._1.jpg."""
    name = Path(path)
    return name.suffix.lower() in IMG_EXTENSIONS and not name.name.startswith(".")


def _crop(split: str, size: int) -> v2.Transform:
    if split == "train":
        return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return v2.Compose([v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size), v2.PILToTensor()])


def _folder_of(split: str, root: Path) -> Path:
    candidates = [root / name for name in (("train",) if split == "train" else ("val", "eval"))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(
        f"data.dataset.root={root}: {' or '.join(map(str, candidates))} does not exist; expected a folder "
        "that contains one folder per class"
    )


def read_rgb(path: str) -> Image.Image:
    """Decode an image as RGB, 8 bits per channel, rotated as its EXIF data specifies, or raise OSError."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format in ("PNG", "PPM")):
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            if image.mode in ("I", "F"):  # Pillow would clip values above 255
                raise ValueError(
                    f"32 bits per channel (mode {image.mode}) are not supported; save the image with 8 or 16 "
                    "bits"
                )
            return image.convert("RGB")
    except Exception as error:
        if is_retryable(error):
            raise
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
