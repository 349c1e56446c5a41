"""Everything that can go wrong on the command line: one sentence, the right code, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Sage
from PIL import Image

from sagepatch.cli import failures, loading, run, saving
from sagepatch.cli.sources import Source
from sagepatch.errors import MachineError

SMALL = ("--width", 16, "--height", 16, "--steps", 2)


def one_sentence(text: str) -> None:
    last = [line for line in text.splitlines() if line.strip()][-1]
    assert last.startswith("sagepatch: ")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("fluxx", "did you mean flux"),
        ("./nowhere", "there is no folder"),
        ("somebody/unknown-model", "offline mode is on"),
        ("flux-dev", "is gated: accept its licence"),
        ("vit", "offline mode is on"),
    ],
)
def test_a_model_that_is_not_there(
    sage: Sage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, says: str
) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    ended = sage("run", model, "--prompt", "x")
    assert ended.code == 3
    assert says in ended.err
    one_sentence(ended.err)


def _hub_error(kind: str) -> BaseException:
    import httpx2
    from huggingface_hub import errors

    request = httpx2.Request("GET", "http://127.0.0.1:9/")
    response = httpx2.Response(404, request=request)
    made: dict[str, BaseException] = {
        "gated": errors.GatedRepoError("no", response=response),
        "unknown": errors.RepositoryNotFoundError("no", response=response),
        "network": httpx2.ConnectError("refused", request=request),
        "cache": errors.LocalEntryNotFoundError("no"),
        "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    }
    return made[kind]


@pytest.mark.parametrize(
    ("kind", "says", "code"),
    [
        ("gated", "accept its licence", 3),
        ("unknown", "the hub has no model", 3),
        ("network", "the hub cannot be reached", 3),
        ("cache", "the hub cannot be reached", 3),
        ("disk", "the disk is full", 3),
    ],
)
def test_what_the_hub_raises_becomes_a_sentence(kind: str, says: str, code: int) -> None:
    # Loaders wrap what the hub raised.
    wrapped = OSError("cannot load")
    wrapped.__cause__ = _hub_error(kind)
    error = failures.explain(Source("a/b", "a/b"), wrapped)
    assert says in str(error)
    assert error.exit_code == code


def test_a_hub_without_an_address_is_not_tried(sage: Sage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its client tried each file again and again: 44 s until the same sentence."""

    def unresolved(*_: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    asked: list[bool] = []

    def download(*_: object, local_files_only: bool, **__: object) -> str:
        asked.append(local_files_only)
        raise _hub_error("cache")

    loading._hub_has_no_address.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    ended = sage("inspect", "wan")
    loading._hub_has_no_address.cache_clear()
    assert ended.code == 3
    assert "the hub cannot be reached" in ended.err
    assert asked == [True]
    # A proxy resolves names itself.
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:1"})
    assert not loading._hub_has_no_address()
    loading._hub_has_no_address.cache_clear()


def test_a_folder_without_a_model(sage: Sage, tmp_path: Path) -> None:
    ended = sage("run", tmp_path, "--prompt", "x")
    assert ended.code == 3
    assert "neither model_index.json nor config.json" in ended.err


def test_a_file_instead_of_a_folder(sage: Sage, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    ended = sage("run", tmp_path / "model.safetensors", "--prompt", "x")
    assert ended.code == 3
    assert "is a file" in ended.err


def test_pickled_weights_are_refused(sage: Sage, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    ended = sage("run", folder, "--prompt", "x")
    assert ended.code == 3
    assert "safetensors" in ended.err
    one_sentence(ended.err)


def test_damaged_weights(sage: Sage, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    ended = sage("run", folder, "--prompt", "x")
    assert ended.code == 3
    one_sentence(ended.err)


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ((), "Missing option '--prompt'", 2),
        (("--prompt", "x", "--nonsense"), "No such option", 2),
        (("--prompt", "x", "--variant", "sage9"), "no such name", 4),
        (("--prompt", "x", "--variant", "fast", "--plan", "p.json"), "exclude each other", 2),
        (("--prompt", "x", "--plan", "p.json"), "cannot read the plan", 4),
        (("--prompt", "x", "--dtype", "int8"), "--dtype is 'int8'", 2),
        (("--prompt", "x", "--offload", "model"), "needs a GPU", 2),
        (("--prompt", "x", "--offload", "disk"), "--offload is 'disk'", 2),
        (("--prompt", "x", "--device", "cuda"), "torch sees no GPU", 3),
        (("--prompt", "x", "--device", "abacus"), "--device is 'abacus'", 2),
        (("--prompt", "x", "--out", "x.bmp"), "must end in", 2),
        (("--prompt", "x", "--out", "nowhere/x.png"), "cannot be written", 3),
        (("--prompt", "x", "--out", "/proc/x.png"), "cannot be written", 3),
        (("--prompt", "x", "--report", "x.pdf"), "must end in", 2),
        (("--prompt", "x", "--report", "nowhere/x.html"), "cannot be written", 3),
    ],
)
def test_what_is_refused_before_the_model_loads(
    sage: Sage,
    tiny_flux: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    says: str,
    code: int,
) -> None:
    monkeypatch.setattr(run, "load", None)  # calling it would be a TypeError
    ended = sage("run", tiny_flux, *arguments)
    assert says in ended.err
    assert ended.code == code
    one_sentence(ended.err)


def _plan(sage: Sage, model: Path) -> dict[str, Any]:
    assert sage("calibrate", model, "--prompt", "a", *SMALL, "--emulate").code == 0
    plan: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return plan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": "0" * 16}, "made for another model"),
        ({"schema": 99}, "has schema 99"),
        ({"entries": "none"}, "no list of entries"),
    ],
    ids=["another-model", "newer-schema", "damaged"],
)
def test_a_plan_that_does_not_fit(
    sage: Sage, tiny_flux: Path, change: dict[str, Any], says: str
) -> None:
    plan = _plan(sage, tiny_flux)
    Path("other.json").write_text(json.dumps({**plan, **change}))
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--plan", "other.json")
    assert ended.code == 4
    assert says in ended.err
    one_sentence(ended.err)


def test_a_plan_with_an_unknown_layer(sage: Sage, tiny_flux: Path) -> None:
    plan = _plan(sage, tiny_flux)
    plan["entries"][0]["site"] = "transformer.no_such_layer"
    Path("other.json").write_text(json.dumps(plan))
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--plan", "other.json")
    assert ended.code == 4
    assert "transformer.no_such_layer" in ended.err


def test_a_plot_without_matplotlib(
    sage: Sage, tiny_flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "find_spec", lambda name: None)
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--report", "r.png")
    assert ended.code == 3
    assert 'pip install "sagepatch[plot]"' in ended.err
    assert sage("run", tiny_flux, "--prompt", "a", *SMALL, "--report", "r.html").code == 0


def test_a_full_disk_loses_nothing(
    sage: Sage, tiny_flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = saving.write_bytes

    def full(path: Path, data: bytes) -> None:
        if Path(path).resolve().parent == tmp_path:
            raise MachineError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}")
        real(path, data)

    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(saving, "write_bytes", full)
    monkeypatch.setattr(saving.tempfile, "gettempdir", lambda: str(spare))
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--out", "cat.png")
    assert ended.code == 3
    assert "No space left on device" in ended.err
    assert str(spare / "cat.png") in ended.err
    assert Image.open(spare / "cat.png").size == (16, 16)


def test_a_failing_report_loses_no_picture(
    sage: Sage, tiny_flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(report: object, path: Path) -> None:
        raise MachineError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(run, "write_report", failing)
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--report", "r.html")
    assert ended.code == 3
    assert Image.open(_only_png()).size == (16, 16)


def _only_png() -> Path:
    (found,) = Path().glob("*.png")
    return found


def test_a_failing_second_run_loses_not_the_first(
    sage: Sage, tiny_flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = run.generate, []

    def second_fails(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MachineError("the GPU went away")
        return real(*arguments)

    monkeypatch.setattr(run, "generate", second_fails)
    ended = sage("run", tiny_flux, "--prompt", "a", *SMALL, "--emulate", "--compare")
    assert ended.code == 3
    assert Image.open(_only_png()).size == (16, 16)


# case 37
def test_a_model_without_attention(sage: Sage, tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    ResNetModel(config).save_pretrained(tmp_path / "resnet")
    ended = sage("inspect", tmp_path / "resnet")
    assert ended.code == 3
    assert "nothing in ResNetModel can be patched" in ended.err


def test_interrupting_is_no_traceback(
    sage: Sage, tiny_flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load", interrupted)
    ended = sage("run", tiny_flux, "--prompt", "a")
    assert ended.code == 130
    one_sentence(ended.err)


@pytest.mark.parametrize(("level", "traced"), [("", False), ("debug", True)])
def test_a_fault_of_ours_is_a_sentence_too(level: str, traced: bool) -> None:
    code = (
        "import sagepatch.cli as cli, sys\n"
        "def broken(arguments): raise KeyError('left')\n"
        "cli.run_command = broken\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SAGEPATCH_LOG": level},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "unexpected KeyError: 'left' (a fault of ours" in done.stderr.replace("\n", " ")
    assert ("Traceback" in done.stderr) is traced


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
@pytest.mark.parametrize("arguments", [("info",), ("info", "--json")], ids=" ".join)
def test_a_reader_that_had_enough_is_no_fault(arguments: tuple[str, ...]) -> None:
    """As in `sagepatch info | head -1`: nothing on standard error, the code of a broken pipe."""
    code = f"import sys; sys.argv[1:] = {list(arguments)}\nfrom sagepatch.cli import main; main()"
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads at all
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
