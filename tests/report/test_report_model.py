"""What a report says of a patched layer, and its sums and sentences, on plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from report.report_rows import EXACT, LOST, REPORT, ROW

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.dispatch import Request
from sagepatch.env import Machine
from sagepatch.errors import InvalidArgument
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers.site import Left
from sagepatch.plan import PlanEntry
from sagepatch.report.model import NOT_RUN, PLAN_ONLY, report_of, row_of
from sagepatch.report.printable import printable
from sagepatch.report.summary import AttentionTime, Counts, condensed, first_clause, why_exact
from sagepatch.spec import AttnSpec, MaskKind

PREFILL = AttnSpec(1, 8, 8, 300, 300, 64, 64, "bf16", "bf16", "cuda", 90)
DECODE = AttnSpec(1, 8, 8, 1, 301, 64, 64, "bf16", "bf16", "cuda", 90)
ENTRY = PlanEntry(
    "blocks.0", "self", "triton.sage2_8", 1, "cosine 0.99900, 1.3x exact",
    samples=4, shapes=(str(PREFILL),), dtype="bf16", cosine=0.999, cosine_mean=0.9995,
    rel_l1=0.03, rmse=0.01, norm_ratio=1.001, worst_head=3, worst_call=8, max_abs_v=9.0,
    us_exact=400.0, us_chosen=300.0,
)  # fmt: skip


def _layer(request: str = "triton.sage2_8", name: str = "blocks.0") -> PatchedLayer:
    layer = PatchedLayer(name, "self", Policy(), Request("exact"), unusable)
    layer.run_with(Request(request), ENTRY.reason)
    return layer


def _ran(layer: PatchedLayer, spec: AttnSpec, variant: str, times: int, why: str = "") -> None:
    for _ in range(times):
        layer.record.ran(spec, variant)
        if why:
            layer.record.fell_back(why)


def test_a_row_holds_what_was_measured_and_counted() -> None:
    layer = _layer()
    _ran(layer, PREFILL, "sdpa.exact", 8)
    _ran(layer, PREFILL, "triton.sage2_8", 20)
    row = row_of(layer, ENTRY, None)
    assert (row.variant, row.tier, row.kind) == ("triton.sage2_8", "fast", "self")
    assert (row.cosine, row.rel_l1, row.rmse, row.worst_head) == (0.999, 0.03, 0.01, 3)
    assert (row.worst_call, row.cosine_mean, row.max_abs_v) == (8, 0.9995, 9.0)
    assert (row.us_exact, row.us_chosen) == (400.0, 300.0)
    assert (row.calls, row.quantised_calls, row.calls_as_measured) == (28, 20, 28)
    assert row.by_variant == {"sdpa.exact": 8, "triton.sage2_8": 20}
    assert (row.shape, row.mask) == ("1x8x300x300x64 bf16", "none")
    assert row.reason == ENTRY.reason


def test_a_layer_that_has_not_run_shows_its_entry() -> None:
    row = row_of(_layer(), ENTRY, None)
    assert (row.variant, row.calls, row.shape) == ("triton.sage2_8", 0, str(PREFILL))
    assert (row.cosine, row.us_chosen) == (0.999, 300.0)


def test_unknown_is_none() -> None:
    row = row_of(_layer("exact"), PlanEntry("blocks.0", "self", "sdpa.exact", 1, ""), None)
    assert row.shape is row.mask is row.cosine is row.us_exact is row.us_chosen is None


# case 37
def test_a_kernel_that_never_ran_is_not_reported_as_running() -> None:
    layer = _layer()
    _ran(layer, replace(PREFILL, device="cpu"), "sdpa.exact", 5, "device is cpu, needs cuda")
    row = row_of(layer, ENTRY, None)
    assert (row.variant, row.tier, row.quantised_calls) == ("sdpa.exact", "exact", 0)
    assert row.reason == f"device is cpu, needs cuda; {ENTRY.reason}"
    assert row.cosine is None
    assert row.us_chosen == row.us_exact


# case 66
@pytest.mark.parametrize("request_", ["fast", "sage1_b"])
def test_a_wish_that_no_kernel_met_says_why(request_: str) -> None:
    layer = _layer(request_)
    layer.reason = f"variant={request_!r} was asked for"
    _ran(layer, PREFILL, "sdpa.exact", 3, "dtype is fp64, needs bf16")
    row = row_of(layer, PlanEntry("blocks.0", "self", "sdpa.exact", 1, layer.reason), None)
    assert row.reason.startswith("dtype is fp64, needs bf16; variant=")


def test_refusals_of_many_kernels_are_counted() -> None:
    kernels = [name for name in BY_NAME if name.startswith("triton.")]
    layer = _layer("fast")
    why = "; ".join(f"{name}: device is cpu, needs cuda" for name in kernels)
    _ran(layer, PREFILL, "sdpa.exact", 2, f"{why}; emulated.sage2_8: ask with emulate=True")
    row = row_of(layer, PlanEntry("blocks.0", "self", "sdpa.exact", 1, ""), None)
    told = (
        f"no kernel serves its calls: {len(kernels)} triton kernels: device is cpu, needs cuda; "
        "emulated.sage2_8: ask with emulate=True"
    )
    assert row.fallbacks == {told: 2}
    assert first_clause(row.reason) == "no kernel serves its calls"
    two = "triton.sage2_8: no; triton.sage1_b: no"
    assert condensed(two) == two
    assert condensed("a: b; c: d; e: f") == "a: b; c: d; e: f"


def test_what_the_machine_lacks_is_said_where_nothing_is_quantised() -> None:
    lacking = {"problems": ("torch sees no GPU: check the driver",)}
    assert (
        "torch sees no GPU: check the driver"
        in replace(REPORT, layers=(EXACT,), machine=lacking).remarks()
    )
    assert "torch sees no GPU: check the driver" not in replace(REPORT, machine=lacking).remarks()
    assert replace(REPORT, layers=(EXACT,), machine={"problems": 3}).remarks()


# case 46
def test_a_layer_kept_from_measuring_says_by_what() -> None:
    layer = _layer("exact")
    layer.reason = "only 0 of 2 samples seen: stays exact"
    _ran(layer, PREFILL, "sdpa.exact", 9, "training: gradients need the original call")
    row = row_of(layer, PlanEntry("blocks.0", "self", "sdpa.exact", 1, layer.reason), None)
    assert row.reason.startswith("training: gradients need the original call; only 0 of 2")


def test_an_exact_layer_with_few_fallbacks_keeps_its_reason() -> None:
    layer = _layer("exact")
    _ran(layer, PREFILL, "sdpa.exact", 9)
    _ran(layer, PREFILL, "sdpa.exact", 1, "attention maps were asked for")
    row = row_of(layer, replace(ENTRY, variant="sdpa.exact", us_chosen=400.0), None)
    assert row.reason == ENTRY.reason
    assert row.fallbacks == {"attention maps were asked for": 1}


# case 47
def test_a_demoted_layer_says_so_and_shows_no_errors_of_the_kernel() -> None:
    layer = _layer()
    _ran(layer, PREFILL, "triton.sage2_8", 2)
    layer.demote("triton.sage2_8 gave a non-finite output on finite inputs")
    row = row_of(layer, PlanEntry("blocks.0", "self", "sdpa.exact", 1, ""), None)
    assert (row.variant, row.cosine) == ("sdpa.exact", None)
    assert row.reason.startswith("demoted: triton.sage2_8 gave a non-finite")
    assert row.notes[0].startswith("demoted to exact attention")


def test_decoding_is_neither_the_shape_nor_the_time_of_a_layer() -> None:
    layer = _layer()
    _ran(layer, PREFILL, "triton.sage2_8", 2)
    _ran(layer, DECODE, "sdpa.exact", 500, "short: a single query")
    row = row_of(layer, ENTRY, None)
    assert row.shape == str(PREFILL)
    assert (row.calls, row.calls_as_measured) == (502, 2)


@pytest.mark.parametrize("kind", list(MaskKind), ids=str)
def test_the_mask_is_named(kind: MaskKind) -> None:
    layer = _layer()
    _ran(layer, replace(PREFILL, mask=kind, causal_offset=0), "triton.sage2_8", 1)
    assert row_of(layer, ENTRY, None).mask == kind.value


def test_a_report_of_a_patch_is_printable() -> None:
    evil = "blocks.\x1b[2J\u202e\ud800"
    layer = _layer(name=evil)
    layer.record.note("bell\a")
    made = report_of(
        parts="Model\n",
        layers=[layer],
        left=[Left(evil, "self", "why\t")],
        entries={evil: ENTRY},
        replaced={evil: "X\x07"},
        machine=Machine.here(),
        threshold=0.998,
        emulated=False,
        warnings=["careful\r"],
    )
    assert made.layers[0].name == r"blocks.\x1b[2J\u202e\ud800"
    assert made.layers[0].replaced_by == r"X\x07"
    assert made.left[0].reason == r"why\t"
    assert made.model == r"Model\n"
    for text in (str(made), made.to_html(), made.to_json()):
        assert not set(text) & {"\x1b", "\a", "\r", "\u202e", "\ud800"}


@pytest.mark.parametrize("text", ["plain", "naïve 模型 🍎", "<b>&$"])
def test_what_only_shows_stays(text: str) -> None:
    assert printable(text) == text


# case 37
def test_counts_and_headline() -> None:
    rows = (ROW, EXACT, LOST, replace(ROW, tier="safe"))
    counts = Counts.of(rows, left=2)
    assert counts == Counts(found=6, patched=3, fast=1, safe=1, exact=1, left=2, lost=1)
    text = replace(REPORT, layers=rows).headline()
    assert text.startswith("FluxPipeline: 5 attention layers found, 3 patched (1 fast, 1 safe, 1")
    assert "1 left alone; 1 no longer patched, apply again to repair" in text


def test_why_layers_are_exact() -> None:
    slow = replace(EXACT, reason="kept from an earlier run: exact is fastest: 90 us, x takes 99 us")
    assert why_exact([ROW]) is None
    assert why_exact([EXACT]) == "Every layer runs exact attention: no kernel is accurate enough."
    assert why_exact([ROW, EXACT]) == "1 layer runs exact attention: no kernel is accurate enough."
    assert why_exact([ROW, EXACT, EXACT, slow]) == (
        "3 layers run exact attention: no kernel is accurate enough (2), exact is fastest (1)."
    )
    many = [replace(EXACT, reason=f"reason {n}") for n in range(9)]
    assert "5 more reasons" in (why_exact(many) or "")
    assert why_exact([replace(EXACT, replaced_by="X")]) is None


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("only 1 of 2 samples seen: stays exact", "only 1 of 2 samples seen"),
        ("device is cpu, needs cuda; variant='fast' was asked for", "device is cpu, needs cuda"),
        ("demoted: x gave a non-finite output", "demoted: x gave a non-finite output"),
        ("", "no reason was kept"),
    ],
)
def test_kinds_of_reasons(reason: str, kind: str) -> None:
    assert first_clause(reason) == kind


def test_a_model_that_has_not_run_yet() -> None:
    idle = replace(ROW, calls=0, quantised_calls=0, samples=0)
    assert NOT_RUN in replace(REPORT, layers=(idle,)).remarks()
    assert NOT_RUN not in REPORT.remarks()
    # As `sagepatch calibrate` prints it: there is nothing that a user should run first.
    planned = replace(REPORT, layers=(replace(idle, samples=4, fallbacks={}),))
    assert {NOT_RUN, PLAN_ONLY}.intersection(planned.remarks()) == {PLAN_ONLY}
    assert "calls" not in str(planned)
    assert "0/0" not in str(planned)
    assert NOT_RUN not in replace(REPORT, layers=()).remarks()


# case 67
def test_attention_share_and_expected_gain() -> None:
    rows = [
        replace(ROW, us_exact=400.0, us_chosen=300.0, calls_as_measured=1000),
        replace(ROW, us_exact=100.0, us_chosen=100.0, calls_as_measured=1000),
        replace(ROW, us_exact=None),
        replace(ROW, calls_as_measured=0),
    ]
    time = AttentionTime.of(rows, run_seconds=1.0)
    assert time is not None
    assert (time.layers, time.calls, time.us_exact, time.us_chosen) == (2, 2000, 5e5, 4e5)
    assert time.gain == pytest.approx(1.25)
    assert time.share == pytest.approx(0.4)
    # 0.6 s of other work and 0.5 s of exact attention, against 1.0 s.
    assert time.run_gain == pytest.approx(1.1)
    assert "500.00 ms exact, 400.00 ms with these kernels (1.25x)" in time.sentence()
    assert "40% of the run, which is 1.10x as fast as with exact" in time.sentence()


def test_attention_time_that_cannot_be_told() -> None:
    assert AttentionTime.of([replace(ROW, us_chosen=None)]) is None
    assert AttentionTime.of([]) is None
    assert replace(REPORT, emulated=True).attention() is None
    # Calls of several runs do not fit into the time of one: nothing is made of it.
    time = AttentionTime.of([ROW], run_seconds=1e-6)
    assert time is not None
    assert time.share is time.run_gain is None
    assert "of the run" not in time.sentence()
    with pytest.raises(InvalidArgument, match="more than 0"):
        REPORT.with_run_time(0.0)


def test_counting_goes_on_while_a_report_is_made() -> None:
    layer = _layer()
    _ran(layer, PREFILL, "triton.sage2_8", 1)
    row = row_of(layer, ENTRY, None)
    _ran(layer, PREFILL, "triton.sage2_8", 1)
    assert (row.calls, row.by_variant) == (1, {"triton.sage2_8": 1})
    assert layer.record.by_variant == Counter({"triton.sage2_8": 2})
