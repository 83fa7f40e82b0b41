"""Images in one folder per class: real PNG and JPEG files, some of them broken."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from PIL import Image

from tests.data.settings import eval_loader, message_of, train_loader
from trainer.data.imagefolder import ImageFolder, read_rgb
from trainer.errors import UserError

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Per class, four training images and one evaluation image, of various sizes, modes and formats."""
    for split, count in (("train", 4), ("val", 1)):
        for name, colour in COLOURS.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (40 + i, 30), colour)
                image.convert("P" if i == 1 else "RGB").save(folder / f"{i}.{'jpg' if i == 2 else 'png'}")
    return tmp_path


def test_images_are_uint8_with_their_class_index(root: Path) -> None:
    train, held_out = ImageFolder("train", str(root), 16), ImageFolder("eval", str(root), 16)
    assert (len(train), len(held_out), train.num_classes, train.input_shape) == (8, 2, 2, (3, 16, 16))
    for dataset in (train, held_out):
        for image, label in (dataset[i] for i in range(len(dataset))):
            colour = torch.tensor(COLOURS[("blue", "red")[label]])
            assert (image.shape, image.dtype) == ((3, 16, 16), torch.uint8)
            assert (image.int() - colour.view(3, 1, 1)).abs().max() <= 2


def test_training_crops_at_random_and_evaluation_at_the_centre(root: Path) -> None:
    """The image has red that increases from left to right."""
    ramp = Image.frombytes("L", (64, 64), bytes(range(0, 256, 4)) * 64)
    Image.merge("RGB", (ramp, ramp, ramp)).save(root / "train/blue/0.png")
    Image.merge("RGB", (ramp, ramp, ramp)).save(root / "val/blue/0.png")
    held_out = ImageFolder("eval", str(root), 56)
    image, _ = held_out[0]
    assert torch.equal(image, held_out[0][0])
    assert image[0, 0].tolist() == list(range(16, 240, 4))  # 4 pixels off either side
    assert torch.equal(image, ImageFolder.unlabelled(held_out.samples[0][0], image_size=56, root="/gone"))
    train = ImageFolder("train", str(root), 56)
    crops = [train[0][0] for _ in range(12)]
    assert len({crop[0, 0, 0].item() for crop in crops}) > 6
    assert len({bool(crop[0, 0, -1] > crop[0, 0, 0]) for crop in crops}) == 2, "some are mirrored"


def test_a_broken_image_is_named_with_path_and_index(root: Path) -> None:
    path = root / "train/red/2.jpg"  # index 6
    for content in (b"not an image", path.read_bytes()[:-40]):
        path.write_bytes(content)
        message = message_of(train_loader(ImageFolder("train", str(root), 16), 8).epoch(0))
        assert message.startswith(f"sample 6 of ImageFolder cannot be read: {path}: ") and "\n" not in message


def test_a_broken_image_can_be_skipped(root: Path) -> None:
    for path in ("train/red/2.jpg", "val/red/0.png"):
        (root / path).write_bytes(b"")
    train = train_loader(ImageFolder("train", str(root), 16), 8, on_bad_sample="skip", num_workers=2)
    [(images, labels)] = list(train.epoch(0))
    assert images.shape == (8, 3, 16, 16)
    assert labels.sum() == 4
    assert train.num_skipped == 1
    held_out = eval_loader(ImageFolder("eval", str(root), 16), 8, on_bad_sample="skip")
    [((images, labels), which)] = list(held_out)
    assert (labels.tolist(), which, held_out.num_skipped) == ([0], [0], 1)


def test_invalid_folders_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.dataset.root=/nowhere: /nowhere/train does not exist"):
        ImageFolder("train", "/nowhere")
    (root / "train/green").mkdir()
    with pytest.raises(UserError, match=r"green"):  # without an image
        ImageFolder("train", str(root))
    Image.new("RGB", (8, 8)).save(root / "train/green/0.png")
    with pytest.raises(
        UserError, match=r"must contain the same classes, but 1 are in only one of them: green"
    ):
        ImageFolder("eval", str(root))
    (root / "val").rename(root / "test")
    with pytest.raises(UserError, match=r"/val or .*/eval does not exist"):
        ImageFolder("eval", str(root))


def test_exif_rotation_and_16_bit_images(tmp_path: Path) -> None:
    shades = np.arange(0, 65536, 512, dtype=np.uint16).reshape(8, 16)
    for name in ("grey.png", "grey.tif"):
        Image.fromarray(shades).save(tmp_path / name)
        assert np.array_equal(np.asarray(read_rgb(str(tmp_path / name)))[..., 0], shades >> 8)
    (tmp_path / "grey.pgm").write_bytes(b"P5 16 8 65535\n" + shades.astype(">u2").tobytes())
    assert np.array_equal(np.asarray(read_rgb(str(tmp_path / "grey.pgm")))[..., 0], shades >> 8)
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(OSError, match=r"float.tif: .*32 bits per channel \(mode F\)"):
        read_rgb(str(tmp_path / "float.tif"))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter turn clockwise
    sideways = Image.fromarray((shades >> 8).astype(np.uint8))
    sideways.save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(np.asarray(read_rgb(str(tmp_path / "turned.png")))[..., 0], np.rot90(sideways, -1))


def test_hidden_files_are_neither_classes_nor_images(root: Path) -> None:
    (root / "train/.ipynb_checkpoints").mkdir()
    Image.new("RGB", (8, 8)).save(root / "train/.ipynb_checkpoints/0-checkpoint.png")
    (root / "train/red/._0.png").write_bytes(b"of macOS")
    train = ImageFolder("train", str(root), 16)
    assert (train.classes, len(train)) == (["blue", "red"], 8)
