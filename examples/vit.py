"""A vision transformer: patch it with emulated kernels and see what each recipe does to its logits.

python examples/vit.py
"""

import argparse

import torch
from transformers import AutoModelForImageClassification

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="google/vit-base-patch16-224")
    options = parser.parse_args()

    model = AutoModelForImageClassification.from_pretrained(options.model).eval()
    size = model.config.image_size
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(pixels).logits
        # Emulated, so that this runs anywhere. On a GPU calls as short as these stay exact: nothing
        # is gained there ("sagepatch explain 1x12x197x197x64").
        for variant in ("emulated.sage2pp_8", "emulated.sage2_8", "emulated.sage1_b"):
            with sagepatch.apply(model, variant=variant):
                error = (model(pixels).logits - plain).norm() / plain.norm()
            print(f"{variant:20} logits differ by {error:.5f}")


if __name__ == "__main__":
    main()
