"""Every example runs, its hub ids replaced by tiny local models of the same classes."""

from __future__ import annotations

import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from models import saved, transformers_models
from models.diffusers_pipelines import tiny_flux_pipeline, tiny_sdxl_pipeline

import sagepatch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flux(tmp_path: Path, monkeypatch, capsys) -> None:
    model = saved.save_tiny_flux(tmp_path / "flux")
    run("flux.py", "--model", str(model), "--size", "32", monkeypatch=monkeypatch)
    assert (tmp_path / "flux.png").exists()
    assert "Content-Security-Policy" in (tmp_path / "flux_report.html").read_text()
    assert "attention layers found" in capsys.readouterr().out


def test_wan(tmp_path: Path, monkeypatch, capsys) -> None:
    model = saved.save_tiny_wan(tmp_path / "wan")
    size = ("--height", "16", "--width", "16", "--frames", "5", "--steps", "2")
    run("wan.py", "--model", str(model), *size, monkeypatch=monkeypatch)
    assert (tmp_path / "wan.gif").exists()
    assert (tmp_path / "wan_plan.json").exists()
    assert "WanPipeline" in capsys.readouterr().out


def test_llama(tmp_path: Path, monkeypatch, capsys) -> None:
    model = saved.save_tiny_llama(tmp_path / "llama")
    run("llama.py", "--model", str(model), "--tokens", "4", monkeypatch=monkeypatch)
    assert "the same text as unpatched" in capsys.readouterr().out


def test_vit(tmp_path: Path, monkeypatch, capsys) -> None:
    from transformers import ViTForImageClassification

    plain, _ = transformers_models.tiny_vit()
    ViTForImageClassification(plain.config).save_pretrained(tmp_path / "vit")
    run("vit.py", "--model", str(tmp_path / "vit"), monkeypatch=monkeypatch)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "differ" in line]
    assert [line[0] for line in lines] == [
        "emulated.sage2pp_8",
        "emulated.sage2_8",
        "emulated.sage1_b",
    ]
    assert all(0 < float(line[-1]) < 0.1 for line in lines)


def test_custom_module(monkeypatch, capsys) -> None:
    run("custom_module.py", monkeypatch=monkeypatch)
    assert "3 patched (3 fast" in capsys.readouterr().out


def test_share_plan(tmp_path: Path, monkeypatch, capsys) -> None:
    tiny_sdxl_pipeline().save_pretrained(tmp_path / "sdxl")
    arguments = ("--model", str(tmp_path / "sdxl"), "--steps", "2", "--emulate")
    run("share_plan.py", *arguments, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "threshold 0.998" in out
    assert (tmp_path / "plan.json").exists()


def test_serve() -> None:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    pipe = tiny_flux_pipeline()
    patch = sagepatch.apply(pipe, variant="sage1_b", emulate=True)
    client = TestClient(serve["app_of"](pipe, patch, 16))

    def draw(seed: int) -> bytes:
        asked = {"prompt": "a cat", "steps": 2 + seed % 2, "seed": seed}
        answer = client.post("/draw", params=asked)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "image/png"
        return answer.content

    one_by_one = [draw(seed) for seed in range(8)]
    assert len(set(one_by_one)) == 8
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(draw, range(8))) == one_by_one
    assert pipe.scheduler.timesteps.numel() != 2  # nobody's request moved the shared one
    report = client.get("/report").json()
    assert {layer["variant"] for layer in report["layers"]} == {"emulated.sage1_b"}
    assert client.post("/draw", params={"prompt": "a", "steps": 0}).status_code == 422
    patch.restore()


def test_serve_loads_patches_and_listens(tmp_path: Path, monkeypatch) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    served: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, port: served.update(app=app, port=port))
    model = saved.save_tiny_flux(tmp_path / "flux")
    run("serve.py", "--model", str(model), "--port", "8001", monkeypatch=monkeypatch)
    assert served["port"] == 8001
    assert {"/draw", "/report"} <= {route.path for route in served["app"].routes}
