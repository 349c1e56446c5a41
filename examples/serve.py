"""Serve a patched pipeline: POST a prompt to /draw and get a PNG, GET /report for what ran where.

pip install fastapi uvicorn
python examples/serve.py --model black-forest-labs/FLUX.1-schnell
curl -X POST "localhost:8000/draw?prompt=a+red+apple" --output apple.png
"""

import argparse
import copy
import io
import threading
from typing import Annotated, Any

import torch
from diffusers import DiffusionPipeline
from fastapi import FastAPI, Query, Response

import sagepatch

Steps = Annotated[int, Query(ge=1, le=50)]


def app_of(pipe: Any, patch: sagepatch.Patch, size: int) -> FastAPI:
    """The service of one patched pipeline; requests share its models and run side by side."""
    app = FastAPI(title="sagepatch")
    mine = threading.local()

    def pipe_of_this_thread() -> Any:
        # What a call changes is each thread's own: the scheduler's place in the loop, the padding
        # that a tokenizer is set to. The weights are shared.
        if not hasattr(mine, "pipe"):
            mine.pipe = type(pipe)(
                **{
                    name: part if isinstance(part, torch.nn.Module) else copy.deepcopy(part)
                    for name, part in pipe.components.items()
                }
            )
            mine.pipe.set_progress_bar_config(disable=True)
        return mine.pipe

    # Not async: FastAPI runs each request in a thread, and one does not wait for the other.
    @app.post("/draw", response_class=Response)
    def draw(prompt: str, steps: Steps = 4, seed: int = 0) -> Response:
        own = pipe_of_this_thread()
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = {"height": size, "width": size}
        picture = own(prompt, num_inference_steps=steps, generator=generator, **shape).images[0]
        png = io.BytesIO()
        picture.save(png, "PNG")
        return Response(png.getvalue(), media_type="image/png")

    # Counts may be approximate while requests run; pictures are those of one after the other.
    @app.get("/report")
    def report() -> Response:
        return Response(patch.report().to_json(), media_type="application/json")

    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-schnell")
    parser.add_argument("--plan", help="from `sagepatch calibrate`; else the safe tier everywhere")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = DiffusionPipeline.from_pretrained(options.model, dtype=dtype).to(device)
    # Settled before the first request: a layer that calibrates is exact, and slower, meanwhile.
    patch = sagepatch.apply(pipe, plan=options.plan, variant="auto" if options.plan else "safe")
    uvicorn.run(app_of(pipe, patch, options.size), port=options.port)


if __name__ == "__main__":
    main()
