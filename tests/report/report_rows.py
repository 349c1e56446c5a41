"""Rows and a report to render, as plain values."""

from __future__ import annotations

import math
from dataclasses import replace

from sagepatch.patchers.site import Left
from sagepatch.plan import PlanRange
from sagepatch.report.model import LayerRow, Report

EVIL = "blocks.<script>alert('x')</script>&amp;"
SHAPE = "1x24x4608x4608x128 bf16"
ROW = LayerRow(
    name="blocks.0.attn",
    kind="joint",
    variant="triton.sage2_8",
    tier="fast",
    cosine=0.99931,
    cosine_mean=0.99955,
    rel_l1=0.0345,
    rmse=3.5e-3,
    norm_ratio=0.999,
    worst_head=7,
    worst_call=4,
    worst_step=None,
    max_abs_v=12.5,
    us_exact=442.0,
    us_chosen=331.0,
    calls=28,
    quantised_calls=24,
    calls_as_measured=28,
    by_variant={"triton.sage2_8": 24, "sdpa.exact": 4},
    fallbacks={"short: a single query": 2},
    shape=SHAPE,
    mask="none",
    samples=4,
    measured_on=(SHAPE,),
    reason="cosine 0.99931 in the worst head, 1.34x exact",
    replaced_by=None,
    notes=(),
    ranges=(),
    k_offset=14.2,
    q_outlier=9.5,
    p_entropy=0.61,
    remedy=None,
)
LOST = replace(ROW, name=EVIL, replaced_by="SlicedAttnProcessor", cosine=math.nan, us_exact=None)
EXACT = replace(
    ROW,
    name="blocks.1.attn",
    variant="sdpa.exact",
    tier="exact",
    cosine=None,
    cosine_mean=None,
    rel_l1=None,
    rmse=None,
    norm_ratio=None,
    worst_head=None,
    worst_call=None,
    us_chosen=442.0,
    quantised_calls=0,
    by_variant={"sdpa.exact": 28},
    fallbacks={},
    reason="no kernel is accurate enough: triton.sage2_8: cosine 0.99120 < 0.998 (head 2, call 8)",
)
RANGED = replace(
    ROW,
    name="blocks.2.attn",
    cosine=0.99831,
    worst_step=28,
    worst_call=28,
    ranges=(
        PlanRange(0.0, 0.875, "triton.sage1_b", 1, "1.30x exact", 0.99831, 0.05, 7, 22, 340.0),
        PlanRange(0.875, 1.0, "sdpa.exact", 1, "no kernel is accurate enough"),
    ),
    remedy="per-token scales: 0.9987 in the worst head, passes",
)
REPORT = Report(
    "FluxPipeline",
    (ROW, LOST),
    (Left("vae.mid.attn", "self", "head_dim is 512, needs 8 to 256"),),
    {"gpus": [{"name": "NVIDIA H200"}], "versions": {"torch": "2.11"}},
    0.998,
    False,
    ("blocks.0.attn: measured on one shape, has also run another",),
)
