"""Calibrate on many prompts in several processes, one GPU each, and make one plan of all of them.

torchrun --nproc-per-node 2 examples/calibrate_many.py --prompts prompts.txt
accelerate launch --num_processes 2 examples/calibrate_many.py --prompts prompts.txt
"""

import argparse
from pathlib import Path

import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-schnell")
    parser.add_argument("--prompts", required=True, help="a text file, one prompt a line")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--threshold", type=float, default=0.998)
    parser.add_argument("--plan", default="plan.json")
    parser.add_argument("--emulate", action="store_true", help="without a GPU: show accuracy")
    options = parser.parse_args()

    state = PartialState(cpu=not torch.cuda.is_available())
    dtype = torch.bfloat16 if state.device.type == "cuda" else torch.float32
    pipe = DiffusionPipeline.from_pretrained(options.model, dtype=dtype).to(state.device)
    prompts = Path(options.prompts).read_text().splitlines()

    # Padding gives every process at least one prompt: one without any could measure nothing.
    with state.split_between_processes(prompts, apply_padding=True) as mine:

        def draw() -> None:
            for prompt in mine:
                size = options.size
                pipe(prompt, num_inference_steps=options.steps, height=size, width=size)

        calibration = sagepatch.calibrate(pipe, run=draw, emulate=options.emulate)
    if state.num_processes > 1:
        calibration = calibration.gather()
    if state.is_main_process:
        plan = calibration.plan(options.threshold)
        plan.save(options.plan)
        samples = sum(layer.samples for layer in calibration.layers)
        print(f"{options.plan}: {len(plan.entries)} layers, {samples} samples")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
