"""Statistics of inputs, and which remedy is found for which fault."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from models.layers import call, layer, sample

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import diagnose
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.choose import choose
from sagepatch.calibration.diagnose import described, diagnosed, explained
from sagepatch.calibration.measure import Stopwatch, measure
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.remedies import REMEDIES, gained
from sagepatch.calibration.sample import HeadErrors, Remedy, Sample
from sagepatch.calibration.statistics import statistics
from sagepatch.numerics.exact import exact
from sagepatch.numerics.recipe import RECIPES
from sagepatch.ops import run_exact
from sagepatch.spec import Call


class TestStatistics:
    """Numbers that are known beforehand."""

    def test_the_offset_of_keys_is_that_of_the_worst_channel_over_the_spread(self) -> None:
        one = call(H=3, Skv=4000)
        one.k[:, 1, :, 5] += 12.0
        one.k[:, 2] *= 7.0
        found = statistics(one).k_offset
        assert found[1] == pytest.approx(12.0, rel=0.05)
        assert max(found[0], found[2]) < 0.1

    def test_an_outlier_of_queries(self) -> None:
        one = call(H=2, Sq=500)
        one.q[0, 1, 7, 3] = 1000.0
        found = statistics(one).q_outlier
        rms = math.sqrt((1000.0**2 + 500 * 32) / (500 * 32))
        assert found[1] == pytest.approx(1000.0 / rms, rel=0.02)
        assert 3 < found[0] < 6

    def test_the_largest_value_of_each_head(self) -> None:
        one = call()
        one.v[0, 1, 3, 2] = -77.0
        assert statistics(one).v_max[1] == 77.0

    @pytest.mark.parametrize("options", [{}, {"causal_offset": 0}, {"softcap": 5.0}])
    def test_even_rows_have_entropy_1(self, options) -> None:
        one = call(Sq=60, Skv=60, **options)
        even = replace(one, k=torch.zeros_like(one.k))
        assert statistics(even).p_entropy == pytest.approx((1.0, 1.0), abs=0.03)
        sharp = replace(one, q=one.q * 1000)
        if "softcap" not in options:
            assert max(statistics(sharp).p_entropy) < 0.1

    def test_entropy_is_that_of_the_whole_matrix(self) -> None:
        one = call(H=4, Sq=64, Skv=50)
        grouped = replace(one, k=one.k[:, :2], v=one.v[:, :2])
        k = grouped.k.repeat_interleave(2, 1)
        p = torch.softmax(grouped.q @ k.mT * grouped.scale, -1)
        want = (-(p * p.log()).sum(-1) / math.log(50)).mean((0, 2))
        assert statistics(grouped).p_entropy == pytest.approx(want.tolist(), rel=1e-2)

    @pytest.mark.parametrize(
        "mask",
        [
            torch.arange(50)[None, None, None] < 10,
            torch.where(torch.arange(50) < 10, 0.0, -math.inf)[None, None, None],
        ],
        ids=["bool", "added"],
    )
    def test_hidden_keys_do_not_count(self, mask) -> None:
        one = call(Sq=40, Skv=50, attn_mask=mask)
        even = replace(one, k=torch.zeros_like(one.k))
        assert statistics(even).p_entropy == pytest.approx((1.0, 1.0), abs=1e-5)

    @pytest.mark.parametrize("numbers", [1, 500, 1 << 22])
    def test_a_few_heads_at_a_time_give_the_same(self, monkeypatch, numbers: int) -> None:
        from sagepatch.calibration import statistics as module

        one = call(B=2, H=6)
        want = statistics(one)
        monkeypatch.setattr(module, "NUMBERS", numbers)
        got = statistics(one)
        for name in ("k_offset", "q_outlier", "v_max", "p_entropy"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-5)

    def test_packed_and_empty_calls_have_them_too(self) -> None:
        lengths = torch.tensor([0, 20, 33], dtype=torch.int32)
        packed = call(Sq=33, Skv=33, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        assert all(math.isfinite(x) for x in statistics(packed).p_entropy)
        assert statistics(call(Skv=0)).p_entropy == (0.0, 0.0)

    def test_constant_keys_do_not_divide_by_zero(self) -> None:
        one = call()
        one.k[:] = 3.0
        one.q[:] = 0.0
        assert all(x > 1e6 for x in statistics(one).k_offset)
        assert statistics(one).q_outlier == (0.0, 0.0)


def faulty(name: str) -> Call:
    """A call that one remedy alone mends for the recipe of `BASE[name]`."""
    one = call(H=2, Sq=256, Skv=256, D=64, seed=3)
    if name == "per-token scales":
        # One key is large in a channel that no query looks at: the rest of its block loses its
        # digits.
        one.q[..., 5] = 0.0
        one.k[:, :, 70, 5] = 300.0
    if name == "Q smoothing":
        # All queries are off by the same in a channel that hardly tells keys apart.
        one.q[..., 5] += 500.0
        one.k[..., 5] *= 0.01
    if name == "rotation":
        # One channel alone is large, with both signs.
        one.q[..., 3] *= 60
        one.k[..., 3] *= 0.5
    return one


def tried(one: Call, base: str) -> dict[str, float]:
    """Cosine in the worst head of every remedy of a recipe, "" for the recipe itself."""
    out, _ = exact(one)
    row = measure(BY_NAME[base], one, out)
    made = Sample(1, None, None, "s", "fp32", {base: row})
    found = diagnosed(one, out, made, ())
    return {remedy.name: remedy.cosine for remedy in found}


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("per-token scales", "emulated.sage2_8b"),
        ("Q smoothing", "emulated.sage2_8"),
        ("rotation", "emulated.sage2_8"),
    ],
)
def test_each_fault_is_mended_by_its_remedy(name: str, base: str) -> None:
    found = tried(faulty(name), base)
    assert found[""] < 0.998
    assert found[name] >= 0.998, found
    order = [one for one in found if one]
    assert all(found[one] < 0.998 for one in order[: order.index(name)])


def test_remedies_are_in_order_of_cost_and_those_a_recipe_has_are_not_tried() -> None:
    found = tried(faulty("rotation"), "emulated.sage2_8")
    assert list(found) == ["", "Q smoothing", "rotation", "V smoothing", "P and V in FP16"]
    names = list(REMEDIES)
    assert [names.index(one) for one in list(found)[1:]] == sorted(
        names.index(one) for one in list(found)[1:]
    )


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES.values() if not r.exact], ids=lambda r: r.name
)
def test_every_remedy_of_every_recipe_is_a_recipe_that_has_it(recipe) -> None:
    for name, (has, change) in REMEDIES.items():
        if not has(recipe):
            assert has(change(recipe)), name
            assert name in gained(recipe, change(recipe))
    assert gained(recipe, recipe) == ()


def test_a_layer_that_is_well_is_not_diagnosed(monkeypatch) -> None:
    def never(*_):
        raise AssertionError("tried")

    monkeypatch.setattr(diagnose, "_tried", never)
    one = call()
    out, _ = exact(one)
    assert tried_on(one, out, sample(1, {"emulated.sage2_8": 0.9995}), ()) == ()
    # Nothing was cheaper than a safe kernel.
    assert tried_on(one, out, sample(1, {"emulated.sage1_b": 0.9}), ()) == ()
    assert tried_on(one, out, sample(1, {}), ()) == ()
    known = (Remedy("", "sage2_8", "call 1", 0.5, 0.1, 1.0, None),)
    assert tried_on(one, out, sample(1, {"emulated.sage2_8": 0.7}), known) is known


def tried_on(one, out, row, known):
    return diagnosed(one, out, row, known)


def test_a_worse_sample_is_diagnosed_anew() -> None:
    one = faulty("rotation")
    out, _ = exact(one)
    bad = HeadErrors(True, (0.9, 0.8), (0.5, 0.5), (1.0, 1.0), (1.0, 1.0))
    row = Sample(7, 3, 8, "s", "fp32", {"emulated.sage2_8": bad})
    known = (Remedy("", "sage2_8", "call 1", 0.85, 0.1, 1.0, None),)
    found = diagnosed(one, out, row, known)
    assert {remedy.place for remedy in found} == {"call 7 (step 4 of 8)"}
    assert found[0].cosine == 0.8


def test_remedies_that_do_not_fit_in_memory_are_left_out(monkeypatch) -> None:
    def hungry(given, recipe):
        if recipe.rotate:
            raise torch.OutOfMemoryError("no room")
        return exact(given)

    monkeypatch.setattr(diagnose, "emulate", hungry)
    assert "rotation" not in tried(faulty("rotation"), "emulated.sage2_8")


def test_packed_calls_and_masks_are_diagnosed_too() -> None:
    lengths = torch.tensor([0, 40, 256], dtype=torch.int32)
    one = replace(faulty("rotation"), cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    assert tried(one, "emulated.sage2_8")["rotation"] > tried(one, "emulated.sage2_8")[""]
    masked = replace(faulty("rotation"), attn_mask=torch.rand(1, 2, 256, 256) > 0.1)
    assert tried(masked, "emulated.sage2_8")["rotation"] >= 0.998


class TestSentences:
    """What a plan says."""

    BASE = Remedy("", "sage2pp_8", "call 3 (step 2 of 8)", 0.99, 0.1, 1.0, None)
    SMOOTH = replace(BASE, name="Q smoothing", cosine=0.995)
    ROTATE = replace(BASE, name="rotation", cosine=0.9993, rel_l1=0.01)
    FP32 = replace(ROTATE, name="FP16 accumulation off", variant="triton.sage2_8")

    def test_the_first_that_passes_is_named(self) -> None:
        assert explained((self.BASE, self.SMOOTH, self.ROTATE, self.FP32), 0.998) == (
            "sage2pp_8 fails (cosine 0.99000 < 0.998 (call 3 (step 2 of 8))); "
            "tried: Q smoothing 0.99500, rotation 0.99930; rotation helps, no kernel has it alone"
        )
        told = explained((self.BASE, self.FP32), 0.998)
        assert told.endswith("FP16 accumulation off helps, triton.sage2_8 has it")

    def test_another_threshold_has_another_answer(self) -> None:
        every = (self.BASE, self.SMOOTH, self.ROTATE)
        assert explained(every, 0.9) is None
        assert explained(every, 0.99999).endswith("none of them helps")
        assert explained((), 0.998) is None
        assert "tried: nothing" in explained((self.BASE,), 0.998)

    def test_a_kernel_that_is_chosen_instead_says_what_it_has(self) -> None:
        from models.layers import summary

        rows = {
            "triton.sage2pp_8": summary("triton.sage2pp_8", 0.9, us=40.0),
            "triton.sage2_8": summary("triton.sage2_8", 0.9995, us=50.0),
        }
        # In catalogue order the one that sums in FP32 is first.
        turned = {
            "emulated.sage2pp_8": summary("emulated.sage2pp_8", 0.9),
            "emulated.sage2_8": summary("emulated.sage2_8", 0.9995),
        }
        choice = choose(turned, samples=4, threshold=0.998, us_exact=None)
        assert "emulated.sage2pp_8 refused: cosine" in choice.reason
        assert choice.reason.endswith("remedy: FP16 accumulation off")
        assert choose(rows, samples=4, threshold=0.998, us_exact=100.0).variant == "triton.sage2_8"


# case 31
def test_a_bad_layer_says_why_and_what_would_help() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    for number in range(2):
        given = faulty("rotation")
        given.q[:] += 0.01 * number
        out, _ = table.observe(one, given)
        assert torch.equal(out, run_exact(given)[0])
    entry = entry_at(table.table(one), 0.998)
    assert entry.q_outlier > 20
    assert "rotation helps, no kernel has it alone" in entry.remedy
    assert "Q outliers" in described(entry)
    assert described(replace(entry, k_offset=None, q_outlier=None)).startswith("max |V|")


def test_a_batch_of_none_has_statistics_too() -> None:
    empty = call(B=0)
    measured = statistics(empty)
    assert measured.p_entropy == (0.0, 0.0)
