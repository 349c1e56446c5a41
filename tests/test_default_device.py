"""`torch.set_default_device`: what users set for their own tensors moves none of ours."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torch
from models.stacks import stack, tokens

import sagepatch
from sagepatch.backends import selfcheck
from sagepatch.numerics.smooth import hadamard_rotation
from sagepatch.report.pictures import ssim

CPU = torch.device("cpu")


def test_importing_makes_no_tensor_there() -> None:
    # On "cuda" it would start the driver, on "meta" nothing can be read.
    code = "import torch; torch.set_default_device('meta'); import sagepatch"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_layer_s_number_is_read_without_waiting_for_a_gpu() -> None:
    model, x = stack(2), tokens()
    with torch.no_grad():
        with torch.device("meta"):
            patch = sagepatch.apply(model, emulate=True)
            assert all(layer.handle.device == CPU for layer in patch.layers)
            for _ in range(9):
                out = model(x)
        assert patch.locked
        assert torch.equal(out, model(x))
        assert all(layer.record.by_variant.total() == 10 for layer in patch.layers)
        assert all(layer.runs.startswith("emulated.") for layer in patch.layers)


def test_rotations_have_the_same_signs() -> None:
    plain = hadamard_rotation(24, CPU)
    with torch.device("meta"):
        assert torch.equal(hadamard_rotation(24, CPU), plain)


def test_pictures_are_as_alike() -> None:
    # On "meta" unlike pictures once were 1.0 alike.
    noise = torch.Generator().manual_seed(0)
    a, b = ((torch.rand(24, 20, 3, generator=noise) * 255).byte().numpy() for _ in range(2))
    plain = ssim(a, b)
    assert plain < 0.5
    with torch.device("meta"):
        assert ssim(a, b) == plain


def test_the_known_call_is_the_same_everywhere() -> None:
    plain = selfcheck.known_call(torch.device("cpu"))
    with torch.device("meta"):
        moved = selfcheck.known_call(torch.device("cpu"))
    assert torch.equal(moved.q, plain.q)
    assert torch.equal(moved.k, plain.k)
    assert torch.equal(moved.v, plain.v)


# What makes a tensor out of nothing.
FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange"}
FACTORIES |= {"tensor", "as_tensor", "scalar_tensor", "eye", "linspace"}
# Counts on shapes alone, under a default device of its own.
ON_META = {f"cli/forward_{name}.py" for name in ("count", "films", "pictures", "sizes")}


def test_whatever_makes_a_tensor_says_where() -> None:
    root = Path(sagepatch.__file__).parent
    silent = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or {"device", None} & {k.arg for k in node.keywords}:
                continue
            if ast.unparse(node.func).partition("torch.")[2] in FACTORIES:
                silent.append(f"{name}:{node.lineno}")
    assert {place.partition(":")[0] for place in silent} == ON_META, silent
