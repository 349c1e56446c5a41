"""Make a plan, tighten it without measuring again, save it, and use it in another process.

python examples/share_plan.py
"""

import argparse

import torch
from diffusers import DiffusionPipeline

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
    parser.add_argument("--prompt", default="a red apple")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plan", default="plan.json")
    parser.add_argument("--emulate", action="store_true", help="without a GPU: show accuracy")
    options = parser.parse_args()

    pipe = DiffusionPipeline.from_pretrained(options.model)
    if torch.cuda.is_available():
        pipe.to("cuda", torch.bfloat16)

    def draw() -> object:
        return pipe(options.prompt, num_inference_steps=options.steps).images[0]

    calibration = sagepatch.calibrate(pipe, run=draw, emulate=options.emulate)
    for threshold in (0.99, 0.998, 0.9995):
        kernels = [entry.variant for entry in calibration.plan(threshold).entries]
        quantised = sum(kernel != "sdpa.exact" for kernel in kernels)
        print(f"threshold {threshold}: {quantised} of {len(kernels)} layers quantised")
    calibration.plan(0.998).save(options.plan)

    # Anyone with this model can now skip the measuring. A plan for another model is refused.
    with sagepatch.apply(pipe, plan=options.plan) as patch:
        draw()
        print(patch.report())


if __name__ == "__main__":
    main()
