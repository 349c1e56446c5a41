"""Holds the drawing of a contact sheet of pictures with their prompts."""

import textwrap
from pathlib import Path

import numpy as np
from torch import Tensor

COLUMNS = 8
# Two lines of the default font, and the letters of a line that fit under a picture of 128 pixels.
LABEL_HEIGHT, LABEL_LETTERS = 28, 20


def save_sheet(path: Path, images: Tensor, labels: list[str]) -> None:
    """Write 0..1 images [N, 3, H, W] in rows of eight, each above its label, as a PNG."""
    from PIL import Image, ImageDraw

    side = images.shape[-1]
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * side, rows * (side + LABEL_HEIGHT)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = index % COLUMNS * side, index // COLUMNS * (side + LABEL_HEIGHT)
        pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        sheet.paste(Image.fromarray(np.ascontiguousarray(pixels)), (x, y))
        shown = "\n".join(textwrap.wrap(label, LABEL_LETTERS, max_lines=2, placeholder=" ..."))
        pen.text((x + 2, y + side + 1), shown, fill="black", spacing=1)
    sheet.save(path, optimize=True)
