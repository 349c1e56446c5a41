"""`sagepatch run` on tiny models: presets, comparison, plans, variants, videos, text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import Sage
from PIL import Image

SMALL = ("--width", 16, "--height", 16, "--steps", 4)
FLUX = ("run", "flux", "--prompt", "a cat", *SMALL)


@pytest.mark.usefixtures("flux_from_hub")
class TestFlux:
    """The hub id of the preset is mapped to a tiny local pipeline."""

    def test_a_preset_draws_and_reports(self, sage: Sage) -> None:
        ended = sage(*FLUX)
        assert ended.code == 0, ended.err
        assert Image.open("sagepatch-flux.png").size == (16, 16)
        assert "4 attention layers found, 4 patched" in ended.out
        # Without a GPU nothing is quantised, and the report says so of every layer.
        assert "0 fast, 0 safe, 4 exact" in ended.out

    def test_compare_saves_both_side_by_side(self, sage: Sage) -> None:
        ended = sage(*FLUX, "--emulate", "--compare", "--report", "r.json")
        assert ended.code == 0, ended.err
        assert "PSNR" in ended.out
        assert "Emulated kernels: slower than exact attention" in ended.err
        both = np.asarray(Image.open("sagepatch-flux.png"))
        assert both.shape == (16, 16 + 8 + 16, 3)
        report = json.loads(Path("r.json").read_text())
        assert report["pictures"]["ssim"] > 0.9
        assert report["run_seconds"] > 0
        assert report["attention"] is None  # emulations are not timed
        assert [row["quantised_calls"] for row in report["layers"]] == [4, 4, 4, 4]

    def test_the_left_half_is_the_unpatched_picture(self, sage: Sage) -> None:
        assert sage(*FLUX, "--emulate", "--compare", "--out", "both.png").code == 0
        assert sage(*FLUX, "--variant", "exact", "--out", "one.png").code == 0
        both, one = (np.asarray(Image.open(name)) for name in ("both.png", "one.png"))
        assert np.array_equal(both[:, :16], one)
        assert not np.array_equal(both[:, 24:], one)

    @pytest.mark.parametrize("compare", [(), ("--compare",)], ids=["alone", "compared"])
    def test_a_black_picture_is_noticed(
        self, compare: tuple[str, ...], sage: Sage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # case 26
        from sagepatch.cli import run

        drawn = run.generate

        def blackened(*args: Any) -> Any:
            made = drawn(*args)
            runs.append(made)
            black = tuple(np.zeros_like(frame) for frame in made.frames)
            return made if len(runs) <= len(compare) else replace(made, frames=black)

        runs: list[Any] = []
        monkeypatch.setattr(run, "generate", blackened)
        ended = sage(*FLUX, "--variant", "exact", *compare)
        assert ended.code == 0, ended.err
        assert "Look at it: the picture is black" in ended.err

    def test_a_sound_picture_is_not(self, sage: Sage) -> None:
        assert "Look at it" not in sage(*FLUX, "--variant", "exact").err

    def test_seeds_decide_the_picture(self, sage: Sage) -> None:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            assert sage(*FLUX, "--seed", seed, "--out", f"{name}.png").code == 0
        a, b, c = (Path(f"{name}.png").read_bytes() for name in "abc")
        assert a == b != c

    # case 60
    @pytest.mark.parametrize(
        ("threshold", "tiers"),
        [(0, "4 fast, 0 safe, 0 exact"), (1.01, "0 fast, 0 safe, 4 exact")],
        ids=["everything-finite", "nothing"],
    )
    def test_the_threshold_moves_the_plan(self, sage: Sage, threshold: float, tiers: str) -> None:
        ended = sage(*FLUX, "--emulate", "--compare", "--threshold", threshold)
        assert ended.code == 0, ended.err
        assert tiers in ended.out

    def test_a_plan_is_made_and_followed(self, sage: Sage) -> None:
        made = sage(
            "calibrate", "flux", "--prompt", "a cat", "--prompt", "a dog", *SMALL, "--emulate"
        )
        assert made.code == 0, made.err
        assert "plan.json: 4 layers" in made.out
        ended = sage(*FLUX, "--plan", "plan.json", "--report", "r.html")
        assert ended.code == 0, ended.err
        assert ended.out.count("emulated.sage2pp_8") == 4
        assert Path("r.html").read_text().startswith("<!")

    @pytest.mark.parametrize("compare", [(), ("--compare",)])
    def test_a_plan_for_another_model_is_refused_before_the_run(
        self, sage: Sage, tiny_llama: Path, compare: tuple[str, ...]
    ) -> None:
        made = sage("calibrate", tiny_llama, "--prompt", "a cat", "--tokens", 2, "--emulate")
        assert made.code == 0, made.err
        ended = sage(*FLUX, "--plan", "plan.json", *compare)
        assert ended.code == 4
        assert "layers that this model has not" in ended.err
        assert not list(Path().glob("*.png"))

    def test_a_budget_takes_the_place_of_a_threshold(self, sage: Sage) -> None:
        wanted = ("calibrate", "flux", "--prompt", "a", *SMALL, "--emulate")
        made = sage(*wanted, "--budget", 0)
        assert made.code == 0, made.err
        assert "plan.json: 4 layers at budget 0" in made.out
        assert "0 fast, 0 safe, 4 exact" in made.out
        assert sage(*wanted, "--budget", 9).out.count("4 fast") == 1
        both = sage(*wanted, "--budget", 0.1, "--threshold", 0.9)
        assert both.code == 2
        assert "--threshold 0.9 and --budget 0.1 exclude each other" in both.err
        untimed = sage(*wanted, "--time-us", 100)
        assert untimed.code == 3
        assert "which only a GPU gives" in untimed.err

    # case 60
    def test_a_plan_at_another_size_is_used_with_a_warning(self, sage: Sage) -> None:
        assert sage("calibrate", "flux", "--prompt", "a", *SMALL, "--emulate").code == 0
        larger = ("--width", 32, "--height", 32, "--steps", 2, "--plan", "plan.json")
        ended = sage("run", "flux", "--prompt", "a", *larger)
        assert ended.code == 0, ended.err
        assert "has also run" in ended.out

    # case 66
    def test_a_variant_is_a_wish(self, sage: Sage) -> None:
        ended = sage(*FLUX, "--variant", "fast")
        assert ended.code == 0, ended.err
        assert "16 calls ran exact" in ended.out

    # case 66
    def test_strict_makes_it_a_demand_before_the_run(self, sage: Sage) -> None:
        ended = sage(*FLUX, "--variant", "fast", "--strict")
        # All layers of one reason together.
        assert ended.err.count("needs cuda") == 1
        assert "cannot serve this call: layers transformer.transformer_blocks.0" in ended.err
        assert ended.code == 4
        assert not list(Path().glob("*.png"))
        for layer in ("transformer_blocks.1.attn", "single_transformer_blocks.0.attn"):
            assert f"transformer.{layer}" in ended.err
        assert "needs cuda" in ended.err

    def test_strict_lets_through_what_can_be_served(self, sage: Sage) -> None:
        ended = sage(*FLUX, "--variant", "emulated.sage1_b", "--strict")
        assert ended.code == 0, ended.err
        assert "4 patched (0 fast, 4 safe, 0 exact)" in ended.out

    def test_options_that_a_pipeline_does_not_take_are_refused(self, sage: Sage) -> None:
        ended = sage(*FLUX, "--frames", 5)
        assert ended.code == 2
        assert "FluxPipeline takes no num_frames" in ended.err


def test_a_folder_films_a_video(sage: Sage, tiny_wan: Path) -> None:
    ended = sage(
        *("run", tiny_wan, "--prompt", "a cat", "--width", 16, "--height", 16, "--steps", 3),
        *("--frames", 5, "--emulate", "--compare", "--out", "cat.webp"),
    )
    assert ended.code == 0, ended.err
    film = Image.open("cat.webp")
    assert (film.n_frames, film.size) == (5, (40, 16))
    assert "cross" in ended.out


def test_a_language_model_writes(sage: Sage, tiny_llama: Path) -> None:
    ended = sage(
        *("run", tiny_llama, "--prompt", "a cat sat on a mat.", "--tokens", 5),
        *("--emulate", "--compare", "--out", "said.txt"),
    )
    assert ended.code == 0, ended.err
    assert "2 patched (2 fast, 0 safe, 0 exact)" in ended.out
    assert "of 5 tokens are the same" in ended.out or "all 5 tokens" in ended.out
    assert len(Path("said.txt").read_text().splitlines()) == 2


def test_a_language_model_takes_no_picture_options(sage: Sage, tiny_llama: Path) -> None:
    ended = sage("run", tiny_llama, "--prompt", "a", "--steps", 3)
    assert ended.code == 2
    assert "takes no num_inference_steps" in ended.err
