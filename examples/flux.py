"""Draw with FLUX.1 on quantised attention and see which layers run which kernel.

python examples/flux.py --prompt "a red apple" --report report.html
"""

import argparse

import torch
from diffusers import FluxPipeline

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-schnell")
    parser.add_argument("--prompt", default="a red apple on a wooden table")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--report", default="flux_report.html")
    parser.add_argument("--out", default="flux.png")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)

    def draw() -> object:
        generator = torch.Generator("cpu").manual_seed(0)
        size = {"height": options.size, "width": options.size}
        arguments = {"num_inference_steps": options.steps, "guidance_scale": 0.0, **size}
        return pipe(options.prompt, generator=generator, **arguments).images[0]

    # Schnell takes four steps: two generations show each layer the eight calls it wants to see.
    patch = sagepatch.apply(pipe)
    draw(), draw()
    patch.lock()
    draw().save(options.out)
    print(patch.report())
    patch.report().to_html(options.report)


if __name__ == "__main__":
    main()
