"""`inspect`, `explain`, `info`, `bench`, `report`: commands that look and change nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.conftest import Sage

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE
from sagepatch.cli import forward_times, info
from sagepatch.cli.forward_cost import Times
from sagepatch.env import Gpu, Machine, problems
from sagepatch.plan import Plan, PlanEntry


class TestInspect:
    """What would be patched, from configs alone."""

    def test_a_pipeline_without_its_weights(
        self, sage: Sage, tiny_flux: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "configs"
        shutil.copytree(tiny_flux, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        ended = sage("inspect", folder)
        assert ended.code == 0, ended.err
        assert "FluxPipeline (transformer): 4 attention layers, 4 would be patched" in ended.out
        assert "transformer.single_transformer_blocks.1.attn" in ended.out
        assert "2 x 32" in ended.out

    def test_other_parts_when_named(self, sage: Sage, tiny_flux: Path) -> None:
        ended = sage("inspect", tiny_flux, "--component", "text_encoder", "--json")
        assert ended.code == 0, ended.err
        layers = json.loads(ended.out)["layers"]
        assert {row["name"].split(".")[0] for row in layers} == {"text_encoder"}

    def test_what_attention_costs(self, sage: Sage, tiny_flux: Path) -> None:
        ended = sage("inspect", tiny_flux, "--width", 64, "--height", 32)
        assert ended.code == 0, ended.err
        assert "one forward at 64 x 32, 512 tokens of text" in ended.out
        assert "is not predicted: no GPU here to time kernels on" in ended.out
        said = json.loads(sage("inspect", tiny_flux, "--width", 64, "--json").out)
        (forward,) = said["forward"]
        assert 0 < forward["patched_share"] <= forward["attention_share"] < 1
        assert sum(row["share"] for row in said["layers"]) == pytest.approx(
            forward["patched_share"]
        )
        assert forward["gain"] is None

    def test_its_shapes_are_those_of_a_run(self, sage: Sage, tiny_flux: Path) -> None:
        size = ("--width", 32, "--height", 48)
        report = ("--emulate", "--steps", 2, "--report", "r.json")
        assert sage("run", tiny_flux, "--prompt", "a", *size, *report).code == 0
        ran = {
            row["name"]: row["shape"] for row in json.loads(Path("r.json").read_text())["layers"]
        }
        looked = json.loads(sage("inspect", tiny_flux, *size, "--json").out)["layers"]
        assert {row["name"]: f"{row['shape']} fp32" for row in looked} == ran

    def test_a_prompt_of_a_language_model(self, sage: Sage, tiny_llama: Path) -> None:
        said = json.loads(sage("inspect", tiny_llama, "--tokens", 100, "--json").out)
        assert said["forward"][0]["size"] == "a prompt of 100 tokens"
        assert all("x100x100x" in row["shape"] for row in said["layers"])
        assert all(row["shape"].endswith(" causal") for row in said["layers"])

    def test_the_gain_on_a_gpu(
        self, sage: Sage, tiny_flux: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr(forward_times, "rate", lambda device: 1e12)
        monkeypatch.setattr(
            forward_times,
            "measured",
            lambda shapes, device, each: {shape: Times(100.0, 50.0, 80.0) for shape in shapes},
        )
        ended = sage("inspect", tiny_flux)
        assert ended.code == 0, ended.err
        assert "at most 100% of the time" in ended.out
        assert "at most 2.00x as fast where fast kernels are accurate enough, 1.25x where" in (
            ended.out
        )
        unasked = sage("inspect", tiny_flux, "--no-predict").out
        assert "is not predicted: --no-predict times no kernel" in unasked

    @pytest.mark.parametrize("option", ["--tokens", "--frames"])
    def test_a_size_that_a_picture_has_not(self, sage: Sage, tiny_flux: Path, option: str) -> None:
        ended = sage("inspect", tiny_flux, option, 9)
        assert ended.code == 2
        assert f"{option} says nothing about FluxTransformer2DModel" in ended.err
        assert "--height, --width" in ended.err

    def test_a_size_that_a_text_has_not(self, sage: Sage, tiny_llama: Path) -> None:
        ended = sage("inspect", tiny_llama, "--width", 64)
        assert ended.code == 2
        assert "--width says nothing about LlamaForCausalLM, whose forward takes --tokens" in (
            ended.err
        )

    def test_a_film_has_frames(self, sage: Sage, tiny_wan: Path) -> None:
        ended = sage("inspect", tiny_wan, "--frames", 9, "--json")
        assert ended.code == 0, ended.err
        assert "x 9 frames" in json.loads(ended.out)["forward"][0]["size"]

    def test_what_is_not_counted_takes_any_size(self, sage: Sage, tiny_flux: Path) -> None:
        part = ("--component", "text_encoder", "--tokens", 9)
        assert sage("inspect", tiny_flux, *part).code == 0

    def test_a_part_that_cannot_be_counted(self, sage: Sage, tiny_flux: Path) -> None:
        ended = sage("inspect", tiny_flux, "--component", "text_encoder")
        assert ended.code == 0, ended.err
        assert "text_encoder: the share of attention is not known" in ended.out

    def test_an_unknown_part(self, sage: Sage, tiny_flux: Path) -> None:
        ended = sage("inspect", tiny_flux, "--component", "unet")
        assert ended.code == 2
        assert "it has" in ended.err

    def test_one_part_of_a_pipeline(self, sage: Sage, tiny_flux: Path) -> None:
        ended = sage("inspect", tiny_flux / "transformer")
        assert ended.code == 0, ended.err
        assert "4 would be patched" in ended.out

    def test_a_language_model(self, sage: Sage, tiny_llama: Path) -> None:
        ended = sage("inspect", tiny_llama, "--json")
        assert ended.code == 0, ended.err
        names = [row["name"] for row in json.loads(ended.out)["layers"]]
        assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]

    def test_its_fingerprint_is_that_of_the_loaded_model(self, sage: Sage, tiny_flux: Path) -> None:
        small = ("--width", 16, "--height", 16, "--steps", 1)
        assert sage("calibrate", tiny_flux, "--prompt", "a", *small).code == 0
        plan = json.loads(Path("plan.json").read_text())
        looked = json.loads(sage("inspect", tiny_flux, "--json").out)
        assert looked["fingerprint"] == plan["fingerprint"]

    def test_a_narrow_terminal_shows_a_layer_a_line(
        self, sage: Sage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sagepatch.cli.console.PIPED_WIDTH", 80)
        told = sage("inspect", "demo").out
        assert "layer of transformer" in told
        rows = [line.split() for line in told.splitlines() if line.rstrip().endswith("diffusers")]
        assert [row[0] for row in rows].count("single_transformer_blocks.7.attn") == 1
        assert len(rows) == 11

    def test_the_demo(self, sage: Sage) -> None:
        ended = sage("inspect", "demo")
        assert ended.code == 0, ended.err
        assert "would be patched, 0 left alone" in ended.out


class TestExplain:
    """One call through every variant."""

    def test_every_kernel_has_its_reasons(self, sage: Sage) -> None:
        ended = sage("explain", "1x8/3x64x64x64", "--json")
        assert ended.code == 2
        ended = sage("explain", "2x8/2x200x300x96", "--arch", 90, "--mask", "bool", "--json")
        assert ended.code == 0, ended.err
        said = json.loads(ended.out)
        assert said["spec"]["kv_heads"] == 2
        assert said["spec"]["mask"] == "bool"
        assert [kernel["name"] for kernel in said["kernels"]] == [v.name for v in CATALOGUE]
        for kernel in said["kernels"]:
            assert kernel["serves"] is not bool(kernel["reasons"])

    def test_options_reach_the_spec(self, sage: Sage) -> None:
        options = ("--causal", "--causal-offset", 9, "--window", 5, "--softcap", "--sinks")
        ended = sage("explain", "1x4x64x73x64/32", *options, "--packed", "--json")
        spec = json.loads(ended.out)["spec"]
        assert (spec["causal_offset"], spec["window"], spec["v_head_dim"]) == (9, 5, 32)
        assert spec["softcap"]
        assert spec["sinks"]
        assert spec["packed"]

    # case 62
    def test_a_gpu_that_no_kernel_is_made_for_is_told_so(self, sage: Sage) -> None:
        said = sage("explain", "1x24x4608x4608x128", "--arch", 75).out.replace("\n", " ")
        assert "sdpa.exact (no kernel is made for sm_75, only for sm_80, sm_86" in said
        short = sage("explain", "1x24x64x64x128", "--arch", 90).out.replace("\n", " ")
        assert "sdpa.exact (short: 64 queries and 64 keys" in short

    def test_what_cannot_be_served_is_code_4(self, sage: Sage) -> None:
        ended = sage("explain", "1x1x64x64x640", "--variant", "emulated.sage1_b")
        assert ended.code == 4
        assert "head_dim is 640" in ended.err

    def test_what_the_table_says_is_not_said_again(self, sage: Sage) -> None:
        ended = sage("explain", "1x8x512x512x64", "--arch", 0, "--variant", "fast")
        assert ended.code == 4
        assert "device is cpu, needs cuda" in ended.out.replace("\n", " ")
        assert len(ended.err) < 150
        assert "each for its reasons above" in ended.err.replace("\n", " ")

    def test_without_a_gpu_it_says_how_to_ask_for_one(self, sage: Sage) -> None:
        shape = "1x8x512x512x64"
        assert "--arch 90 asks for one" in sage("explain", shape).err
        assert "--arch 90" not in sage("explain", shape, "--arch", 0).err

    @pytest.mark.parametrize("shape", ["1x2x3", "axbxcxdxe", "0x1x2x3x64", "1x5/2x8x8x64"])
    def test_a_shape_that_is_none(self, sage: Sage, shape: str) -> None:
        assert sage("explain", shape).code == 2


class TestInfo:
    """Each state has its own sentence."""

    def test_json_is_json_alone(self, sage: Sage) -> None:
        ended = sage("info", "--json")
        said = json.loads(ended.out)
        assert ended.code == 0
        assert {kernel["name"] for kernel in said["kernels"]} == set(BY_NAME)

    def test_for_people(self, sage: Sage) -> None:
        ended = sage("info")
        assert "sdpa.exact" in ended.out
        assert "torch" in ended.out
        assert ended.out.count("sagepatch 0.") == 1

    def test_kernels_of_one_state_are_one_row_unless_all_are_wanted(
        self, sage: Sage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine("Linux", "3.12", {}, None, (), ())
        monkeypatch.setattr(info, "Machine", SimpleNamespace(here=lambda: machine))
        short, whole = sage("info").out, sage("info", "--all").out
        (without,) = [
            line.rstrip() for line in short.splitlines() if line.rstrip().endswith("no GPU here")
        ]
        counts = [f"{sum(v.toolchain == t for v in CATALOGUE)} {t}" for t in ("cuda", "cuda_mma")]
        assert set(counts) <= set(without.removesuffix("no GPU here").strip().split(", "))
        assert f"--all` lists each of the {len(CATALOGUE)} kernels" in short
        assert len(short.splitlines()) < 10
        assert all(name in whole for name in BY_NAME)

    # case 65
    @pytest.mark.parametrize(
        ("versions", "gpus", "cuda", "says"),
        [
            ({"torch": "2.13.0", "triton": None}, (), None, "triton is not installed"),
            ({"torch": "2.9.1", "triton": "3.9"}, (), "13.0", "torch is 2.9.1, sagepatch needs"),
            ({"torch": "2.13.0", "triton": "3.9"}, (), None, "built without CUDA"),
            ({"torch": "2.13.0", "triton": "3.9"}, (), "13.0", "torch sees no GPU"),
            ({"torch": "2.13.0", "triton": "3.9"}, (Gpu("T4", 75, 1),), "13.0", "T4 is sm_75"),
        ],
        ids=["no-triton", "old-torch", "cpu-torch", "no-gpu", "old-gpu"],
    )
    def test_what_is_missing_is_named(
        self,
        sage: Sage,
        monkeypatch: pytest.MonkeyPatch,
        versions: dict[str, str | None],
        gpus: tuple[Gpu, ...],
        cuda: str | None,
        says: str,
    ) -> None:
        found = problems(versions, gpus, cuda, "linux")
        machine = Machine("Linux", "3.12", versions, cuda, gpus, tuple(found))
        monkeypatch.setattr(info, "Machine", SimpleNamespace(here=lambda: machine))
        ended = sage("info")
        assert ended.code == 0
        assert says in ended.out
        assert sum(line.startswith("- ") for line in ended.out.splitlines()) == len(found)

    # case 65
    def test_states_of_a_gpu_kernel_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = next(v for v in CATALOGUE if v.toolchain == "triton")
        here = Machine("Linux", "3.12", {}, "13.0", (Gpu("G", 90, 1),), ())
        old = Machine("Linux", "3.12", {}, "13.0", (Gpu("T4", 75, 1),), ())
        none = Machine("Linux", "3.12", {}, None, (), ())
        monkeypatch.setattr(info, "unusable", lambda variant: "failed its known-answer check")
        said = [info.state(kernel, machine) for machine in (here, old, none)]
        assert said[0] == "failed its known-answer check"
        assert said[1].startswith("not for sm_75")
        assert said[2] == "no GPU here"

    def test_a_kernel_that_has_not_run_on_this_kind_of_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(info, "unusable", lambda variant: None)
        monkeypatch.setattr(info, "last_failure", lambda variant: None)
        said = {
            arch: info.state(
                BY_NAME["cuda_mma.sage1_b"],
                Machine("Linux", "3.12", {}, "13.0", (Gpu("G", arch, 1),), ()),
            )
            for arch in (86, 90)
        }
        assert said[86] == "compiled, arithmetic checked on sm_90, not yet run on sm_86"
        assert said[90].startswith("not for sm_90: made for sm_80, sm_86")

    def test_tiles_that_nobody_tuned_and_codes_that_travel_wider(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(info, "unusable", lambda variant: None)
        monkeypatch.setattr(info, "last_failure", lambda variant: None)

        def state(name: str, arch: int) -> str:
            machine = Machine("Linux", "3.12", {}, "13.0", (Gpu("G", arch, 1),), ())
            return info.state(BY_NAME[name], machine)

        assert state("triton.sage1_b", 90) == "ready"
        assert state("triton.sage1_b", 80).endswith(
            "not yet run on sm_80; tiles not tuned for sm_80: a default that fits"
        )
        assert "4-bit codes travel as INT8" in state("triton.sage2_4_f16", 90)
        assert "travel" not in state("cuda_mma.sage2_4_f16", 86)


class TestBench:
    """On a CPU: errors of emulated kernels, and no time."""

    def test_on_a_cpu_it_says_so(self, sage: Sage) -> None:
        ended = sage("bench", "--shape", "small_d64", "--recipe", "sage1_b", "--out", "b.csv")
        assert ended.code == 0, ended.err
        assert "emulated kernels only" in ended.err.replace("\n", " ")
        assert "emulated.sage1_b" in ended.out
        assert "ms" not in ended.out.splitlines()[0].split()
        lines = Path("b.csv").read_text().splitlines()
        assert lines[0].startswith("# CPU, torch")
        assert len(lines) == 4

    def test_the_file_to_send(self, sage: Sage) -> None:
        one = ("--shape", "small_d64", "--recipe", "emulated.sage2pp_8")
        ended = sage("bench", *one, "--json", "--out", "b.json")
        assert ended.code == 0, ended.err
        printed, kept = json.loads(ended.out), json.loads(Path("b.json").read_text())
        assert printed == kept
        assert [row["variant"] for row in kept["rows"]] == ["sdpa.exact", "emulated.sage2pp_8"]
        assert kept["gpu"] is None
        assert kept["budget_s"] == 120

    def test_no_time_at_all_is_refused(self, sage: Sage) -> None:
        assert sage("bench", "--seconds", 0).code == 2

    @pytest.mark.parametrize("option", ["--shape", "--recipe"])
    def test_unknown_names(self, sage: Sage, option: str) -> None:
        ended = sage("bench", option, "nonsense")
        assert ended.code == 2
        assert "there are" in ended.err


class TestReport:
    """A saved report, shown again."""

    @pytest.fixture
    def saved(self, sage: Sage, tiny_flux: Path) -> Path:
        small = ("--width", 16, "--height", 16, "--steps", 2, "--report", "r.json")
        assert sage("run", tiny_flux, "--prompt", "a", *small, "--emulate", "--compare").code == 0
        return Path("r.json")

    def test_it_shows_what_the_run_showed(self, sage: Sage, saved: Path) -> None:
        ended = sage("report", saved)
        assert ended.code == 0, ended.err
        assert "4 patched (4 fast, 0 safe, 0 exact)" in ended.out

    def test_it_converts(self, sage: Sage, saved: Path) -> None:
        assert sage("report", saved, "--out", "r.html").code == 0
        assert sage("report", saved, "--out", "r.png").code == 0
        assert Path("r.html").stat().st_size > 1000
        assert Path("r.png").read_bytes().startswith(b"\x89PNG")

    def test_one_layer(self, sage: Sage, saved: Path) -> None:
        name = json.loads(saved.read_text())["layers"][0]["name"]
        told = dict(
            line.split(None, 1) for line in sage("report", saved, "--layer", name).out.splitlines()
        )
        row = json.loads(saved.read_text())["layers"][0]
        assert told["norm_ratio"].strip() == f"{row['norm_ratio']:.4f}"
        assert told["cosine"].strip() == f"{row['cosine']:.5f}"
        assert told["us_exact"].strip() == told["notes"].strip() == told["fallbacks"].strip() == "-"
        ((kernel, calls),) = row["by_variant"].items()
        assert told["by_variant"].strip() == f"{calls} {kernel}"
        assert told["measured_on"].strip() == row["measured_on"][0]
        assert sage("report", saved, "--layer", "nope").code == 2

    def test_against_another_plan(self, sage: Sage, saved: Path) -> None:
        entries = json.loads(saved.read_text())["layers"]
        runs = [(row["name"], row["kind"], row["variant"]) for row in entries]
        same = [PlanEntry(*row, 1, "as it is") for row in runs]
        plan = Plan("f" * 16, "FluxPipeline", 0.998, True, "CPU", {}, tuple(same))
        plan.save("same.json")
        assert (
            "runs the same in all 4 layers" in sage("report", saved, "--against", "same.json").out
        )
        replace(plan, entries=(replace(same[0], variant="sdpa.exact"), *same[1:])).save("b.json")
        ended = sage("report", saved, "--against", "b.json")
        assert "b.json runs 1 of 4 layers differently" in ended.out
        assert ended.out.splitlines()[-1].split()[:3] == [runs[0][0], runs[0][2], "sdpa.exact"]
        assert sage("report", saved, "--against", saved).code == 4

    def test_what_is_no_report(self, sage: Sage, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[]")
        assert sage("report", tmp_path / "x.json").code == 3
        assert sage("report", tmp_path / "missing.json").code == 3
