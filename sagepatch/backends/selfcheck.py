"""The first use of a kernel on a kind of GPU: a small call with a known answer, before the kernel
may serve. The result is kept on disk by kernel, GPU and versions: a pass for good, a failure for
`sagepatch info`, as the next process tries again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sagepatch.backends import load
from sagepatch.env import PACKAGES, VERSION, cache_dir, installed, nvidia_driver
from sagepatch.errors import MachineError, VariantRefused
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call
from sagepatch.variant import Variant

logger = logging.getLogger("sagepatch")

# Kernels whose code is compiled on the machine: a compiler or a driver may get them wrong.
CHECKED = ("triton", "cuda", "cuda_mma")
# Two key tiles and a rest, two query tiles and a rest, grouped heads, causal with an offset.
SHAPE = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 130, "kv_len": 201, "head_dim": 64}
# Added to the record's tolerance, as the emulator sums in other tiles than the kernel.
SLACK = 0.02
# Of each row: kernels come to 0.999. What is left of one as another kernel had it is unrelated, and
# little beside its head.
LEAST_ROW_COSINE = 0.9
# One for each kernel and GPU: kernels are checked side by side, each of them once.
_LOCKS: dict[tuple[str, str], threading.RLock] = {}
# (kernel, GPU) -> why it failed, None where it passed.
_RESULTS: dict[tuple[str, str], str | None] = {}
CALL_FIRST = (
    "it has not passed its known-answer check, which cannot run while a CUDA graph is captured: "
    "call sagepatch.attention once before the capture"
)
# What a kernel's machine code, launches and their judge are made from, beside its own folder.
JUDGES = ("backends/*.py", "numerics/*.py")
FOLDERS = {"triton": ("triton",), "cuda": ("cuda",), "cuda_mma": ("cuda", "cuda_mma")}
PACKAGE = Path(__file__).resolve().parent.parent

# A process forked while another thread checks would wait for that thread for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LOCKS.clear)


def failure(
    variant: Variant, gpu: str | None = None, *, unchecked_in_graphs: bool = True
) -> str | None:
    """Why `variant` may not serve on GPUs named `gpu` (default: such as the current one), None
    where it may; runs the check on first use. What fails on one kind of GPU may serve on another.

    Kernels of CPUs are not checked. While a CUDA graph is captured nothing can be checked: a kernel
    not checked before may serve, or raises `VariantRefused` without `unchecked_in_graphs`.
    """
    if variant.toolchain not in CHECKED or not torch.cuda.is_available():
        return None
    kinds = _each_kind()
    index = next(iter(kinds.values())) if gpu is None else kinds.get(gpu)
    return None if index is None else _failure_on(variant, index, unchecked_in_graphs)


def last_failure(variant: Variant) -> str | None:
    """Why `variant` failed when it was last checked on a GPU of this machine, and on which of
    several kinds; checks nothing.
    """
    if variant.toolchain not in CHECKED or not torch.cuda.is_available():
        return None
    kinds = _each_kind()
    found = {gpu: _RESULTS.get((variant.name, gpu)) or _kept(_facts(variant, gpu)) for gpu in kinds}
    if len(kinds) == 1:
        return next(iter(found.values())) or None
    return "; ".join(f"on {gpu}: {why}" for gpu, why in found.items() if why) or None


def _each_kind() -> dict[str, int]:
    """The name of each kind of GPU and one device number of it, the current one first: a process
    that keeps to one GPU opens no other.
    """
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    kinds: dict[str, int] = {}
    for index in sorted(range(torch.cuda.device_count()), key=lambda number: number != current):
        kinds.setdefault(torch.cuda.get_device_name(index), index)
    return kinds


def _failure_on(variant: Variant, index: int, unchecked_in_graphs: bool) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    served = None if variant.archs is None else variant.archs | variant.tested_on
    if served is not None and 10 * major + minor not in served:
        return None
    gpu = torch.cuda.get_device_name(index)
    key = (variant.name, gpu)
    with _LOCKS.setdefault(key, threading.RLock()):
        if key in _RESULTS:
            return _RESULTS[key]
        facts = _facts(variant, gpu)
        if _kept(facts) == "":
            _RESULTS[key] = None
            return None
        if torch.cuda.is_current_stream_capturing():
            if unchecked_in_graphs:
                return None
            raise VariantRefused(variant.name, (CALL_FIRST,))
        try:
            _RESULTS[key] = why = _check(variant, index)
        except torch.OutOfMemoryError:
            # Says nothing about the kernel: the next call asks again.
            return f"known-answer check: no memory left for it on {gpu}"
        _keep(facts, why)
        if why is not None:
            logger.warning("sagepatch: %s is disabled on %s: %s", variant.name, gpu, why)
        return why


def known_call(device: torch.device, head_dim: int = SHAPE["head_dim"], seed: int = 20) -> Call:
    """A call with a known answer: keys with a common offset, lengths off every tile."""
    # From the CPU whatever the default device: everywhere the same numbers.
    gen, cpu = torch.Generator("cpu").manual_seed(seed), torch.device("cpu")
    B, D = SHAPE["batch"], head_dim
    q = torch.randn(B, SHAPE["q_heads"], SHAPE["q_len"], D, generator=gen, device=cpu)
    k = torch.randn(B, SHAPE["kv_heads"], SHAPE["kv_len"], D, generator=gen, device=cpu)
    v = torch.randn(B, SHAPE["kv_heads"], SHAPE["kv_len"], D, generator=gen, device=cpu)
    k = k + 2 * torch.randn(D, generator=gen, device=cpu)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    offset = SHAPE["kv_len"] - SHAPE["q_len"]
    return Call(q, k, v, D**-0.5, causal_offset=offset, return_lse=True)


def known_calls(variant: Variant, device: torch.device) -> tuple[Call, ...]:
    """The known call of a kernel, and a second one for families of kernels that take two ways. Each
    has numbers of its own: what another kernel, or the other way, left in memory is wrong here.

    `cuda`: without a log-sum-exp the attention itself makes the codes of Q, so a dense call without
    one is asked too. `cuda_mma`: head size 128 has other tiles than 64, and these kernels serve on
    GPUs where nobody has run them yet.
    """
    seed = int.from_bytes(sha256(variant.name.encode()).digest()[:4], "big")
    call = known_call(device, seed=seed)
    if variant.toolchain == "cuda":
        other = known_call(device, seed=seed + 1)
        return call, replace(other, return_lse=False, causal_offset=None)
    if variant.toolchain == "cuda_mma":
        return call, known_call(device, 128, seed + 1)
    return (call,)


def poison(call: Call) -> None:
    """Fill with NaN what the allocator will give a kernel for the output of `call`: freed at once,
    blocks of the same sizes, in the order in which kernels take them. (Small blocks come from a
    pool of their own: a large one reaches none of them.)
    """
    held = [call.empty_out(), *([call.empty_lse()] if call.return_lse else [])]
    for tensor in held:
        tensor.fill_(torch.nan)


def verdict(variant: Variant, call: Call, out: Tensor, lse: Tensor | None) -> str | None:
    """What is wrong with a kernel's answer to `call`, None where nothing is."""
    expected, expected_lse = emulate(call, variant.recipe)
    worst = compare(out.float(), expected.float()).worst
    if not worst.finite:
        return "known-answer check: the output is not finite or was not written everywhere"
    least, most = variant.tolerance.cosine - SLACK / 10, variant.tolerance.rel_l1 + SLACK
    if worst.cosine < least or worst.rel_l1 > most:
        return (
            f"known-answer check: cosine {worst.cosine:.4f} to the emulator, needs {least:.4f}; "
            f"relative L1 {worst.rel_l1:.3f}, needs at most {most:.3f}"
        )
    in_row = float(cosine_similarity(out.float(), expected.float(), dim=-1).min())
    if in_row < LEAST_ROW_COSINE:
        return (
            f"known-answer check: cosine {in_row:.4f} to the emulator in one row, needs "
            f"{LEAST_ROW_COSINE}: it was not written, or is another's"
        )
    if not call.return_lse:
        return None
    assert expected_lse is not None
    if lse is None or not bool(((lse - expected_lse).abs() < 3 * variant.tolerance.lse_abs).all()):
        return "known-answer check: the log-sum-exp is off"
    return None


def _check(variant: Variant, index: int) -> str | None:
    device = torch.device("cuda", index)
    try:
        with torch.cuda.device(device), torch.inference_mode():
            for call in known_calls(variant, device):
                poison(call)
                why = verdict(variant, call, *load(variant.entry)(call, variant.recipe))
                if why is not None:
                    return why
            return None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
        text = str(error).strip().splitlines()
        return f"known-answer check: {type(error).__name__}: {text[0] if text else 'no message'}"


def _facts(variant: Variant, gpu: str) -> dict[str, Any]:
    from sagepatch.backends.cuda.build import nvrtc_version

    compiler = None if variant.toolchain == "triton" else nvrtc_version()
    return {
        "kernel": variant.name,
        "numerics": variant.numerics_version,
        "gpu": gpu,
        "driver": nvidia_driver(),
        "sagepatch": VERSION,
        "sources": _sources(variant.toolchain),
        "torch": torch.__version__,
        "triton": installed(*PACKAGES["triton"]),
        "nvrtc": None if compiler is None else ".".join(map(str, compiler)),
    }


@cache
def _sources(toolchain: str) -> str:
    """One hash of what the kernels of a toolchain and their judge are made from: a checkout that is
    updated in place keeps its version. A few milliseconds, once a process.
    """
    folders = [f"backends/{name}/*" for name in FOLDERS[toolchain]]
    paths = {path for pattern in (*JUDGES, *folders) for path in PACKAGE.glob(pattern)}
    digest = sha256()
    for path in sorted(path for path in paths if path.suffix in (".py", ".cu", ".cuh")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:24]


def _file(facts: dict[str, Any]) -> Path | None:
    try:
        root = cache_dir()
    except MachineError:
        return None
    if root is None:
        return None
    digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return root / "checks" / f"{facts['kernel']}-{digest[:24]}.json"


def _kept(facts: dict[str, Any]) -> str | None:
    """The result of an earlier process: "" for a pass, why it failed, None where there is none."""
    path = _file(facts)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    why = found.pop("failure", None)
    return why if found == facts and isinstance(why, str) else None


def _keep(facts: dict[str, Any], why: str | None) -> None:
    path = _file(facts)
    if path is None:
        return
    # A check that is not kept is made again: no reason to fail.
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump({**facts, "failure": why or ""}, file)
        Path(file.name).replace(path)
