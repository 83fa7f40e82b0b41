"""Draw images of shapes, and store them in the folders that torchvision's ImageFolder expects.

python shapes.py round circle ring disc          writes round/train/<class>/*.png and round/val/<class>/*.png
python shapes.py angular square triangle cross
"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 32
COUNTS = {"train": 100, "val": 25}


def draw(shape: str, choose: random.Random) -> Image.Image:
    """Return an image with a shape at a random position, in a random size and color, on a dark background."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(choose.randrange(60) for _ in range(3)))
    pen, colour = ImageDraw.Draw(image), tuple(choose.randrange(128, 256) for _ in range(3))
    r = choose.randint(6, 11)
    x, y = choose.randint(r, SIZE - r), choose.randint(r, SIZE - r)
    box = (x - r, y - r, x + r, y + r)
    match shape:
        case "circle":
            pen.ellipse(box, outline=colour)
        case "ring":
            pen.ellipse(box, outline=colour, width=4)
        case "disc":
            pen.ellipse(box, fill=colour)
        case "square":
            pen.rectangle(box, fill=colour)
        case "triangle":
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
        case "cross":
            pen.line((x - r, y, x + r, y), fill=colour, width=4)
            pen.line((x, y - r, x, y + r), fill=colour, width=4)
        case _:
            sys.exit(f"{shape} is not one of circle, ring, disc, square, triangle, cross")
    return image


def main(root: Path, shapes: list[str]) -> None:
    choose = random.Random(0)
    for split, count in COUNTS.items():
        for shape in shapes:
            folder = root / split / shape
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(shape, choose).save(folder / f"{number:03}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
