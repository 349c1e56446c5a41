"""The models of benchmarks/true_models.py are those that their names say: counted on fakes, which
hold no weights and compute nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from true_models import CASES, Case, Shape

# Billions of parameters, calls of SDPA, and "query heads x queries x keys" of the largest.
PUBLISHED = {
    "flux_1024": (11.90, 57, (24, 4608, 4608)),
    "flux_2048": (11.90, 57, (24, 16896, 16896)),
    "hunyuanvideo_720p_129f": (12.82, 62, (24, 119056, 119056)),
    "wan_14b_480p_81f": (14.29, 80, (40, 32760, 32760)),
    "wan_14b_720p_81f": (14.29, 80, (40, 75600, 75600)),
    "cogvideox_2b_49f": (1.69, 30, (30, 17776, 17776)),
    "cogvideox_5b_49f": (5.57, 42, (48, 17776, 17776)),
    "sdxl_1024": (2.57, 140, (10, 4096, 4096)),
    "llama_3_1_8b_8k": (8.03, 32, (32, 8192, 8192)),
    "llama_3_1_8b_32k": (8.03, 32, (32, 32768, 32768)),
    "llama_3_1_8b_128k": (8.03, 32, (32, 131072, 131072)),
}


# Calls shorter than this run exactly whatever happens: they need no kernel made ready.
SHORT = 300


class Calls(TorchFunctionMode):
    """Notes the shapes of SDPA calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []
        self.calls: set[Shape] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            query, key = given["query"], given["key"]
            self.shapes.append((query.shape[1], query.shape[2], key.shape[2]))
            kv_heads = 0 if key.shape[1] == query.shape[1] else key.shape[1]
            causal = bool(given.get("is_causal"))
            B, heads, queries, dim = query.shape
            masked = given.get("attn_mask") is not None
            self.calls.add(Shape(B, heads, queries, key.shape[2], dim, kv_heads, causal, masked))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("case", {case.name: case for case in CASES}.values(), ids=lambda c: c.name)
def test_published_geometry(case: Case) -> None:
    billions, calls, largest = PUBLISHED[case.name]
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = case.build(True).eval()
        finally:
            torch.set_default_dtype(before)
        inputs = case.inputs()
        with Calls() as seen:
            model(**inputs, return_dict=False)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == billions
    assert len(seen.shapes) == calls
    assert max(seen.shapes, key=lambda shape: shape[1] * shape[2]) == largest
    long = {call for call in seen.calls if call.q_len >= SHORT}
    # The calls of the sizes that plans are made on are listed too.
    assert long <= set(case.shapes)
