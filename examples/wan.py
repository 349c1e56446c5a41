"""Film with Wan 2.1: calibrate on a short clip once, then run the plan at full length.

python examples/wan.py --prompt "a cat walks on grass"
"""

import argparse
from pathlib import Path

import torch
from diffusers import WanPipeline
from PIL import Image

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    parser.add_argument("--prompt", default="a cat walks on grass")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--plan", default="wan_plan.json")
    parser.add_argument("--out", default="wan.gif")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = WanPipeline.from_pretrained(options.model, dtype=dtype).to(device)

    def film(steps: int) -> list[Image.Image]:
        frames = pipe(
            options.prompt,
            height=options.height,
            width=options.width,
            num_frames=options.frames,
            num_inference_steps=steps,
            generator=torch.Generator("cpu").manual_seed(0),
        ).frames[0]
        return [Image.fromarray((frame * 255).round().astype("uint8")) for frame in frames]

    if not Path(options.plan).exists():
        # Few steps suffice: a layer is called twice a step (with and without the prompt).
        calibration = sagepatch.calibrate(pipe, run=lambda: film(min(4, options.steps)))
        calibration.plan().save(options.plan)
    with sagepatch.apply(pipe, plan=options.plan) as patch:
        frames = film(options.steps)
        print(patch.report())
    frames[0].save(options.out, save_all=True, append_images=frames[1:], duration=62, loop=0)


if __name__ == "__main__":
    main()
