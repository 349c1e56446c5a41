"""The sources of the Hopper kernels with pseudo-random delays around everything by which threads
wait for each other (schedule_noise.cuh), whole or with one wait, arrival or fence taken out. Makes
texts; launches nothing. The sources of the package stay as they are: what is made has names of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sagepatch.backends.cuda.build import FOLDER

NOISE = Path(__file__).with_suffix(".cuh")
# Program, and the file behind which the delays are included.
PROGRAMS = {"attention.cu": "hopper.cuh", "prepass.cu": "ptx.cuh"}
# Files whose text differs where there are delays: those that wait and have a part to take out.
EDITED = ("attention.cu", "attention_copy.cuh", "attention_queries.cuh", "attention_output.cuh")
EDITED += ("prepass.cu", "statistics.cuh")
# What delays cannot be put around by a macro, and loops that wait for a flag: they give up, as
# `wait_for_long` does. (file, what it says, instead)
EDITS = (
    ("attention.cu", "  prepare_shared(", "  noise_begins();\n  prepare_shared("),
    ("attention.cu", "      leave_part(O", "      noise(__LINE__);\n      leave_part(O"),
    ("attention.cu", "        take_part(O", "        noise(__LINE__), take_part(O"),
    ("attention_output.cuh", "  int done;\n", "  int done;\n  const uint32_t since = now_ns();\n"),
    ("attention_output.cuh", "(~0u, done));", "(~0u, done || gives_up(since)));"),
    (
        "statistics.cuh",
        "    while (!read_acquire(ready)) __nanosleep(100);\n",
        "    const uint32_t since = now_ns();\n"
        "    while (!read_acquire(ready) && !gives_up(since)) __nanosleep(100);\n",
    ),
)
# The words of the delays lie behind all that the kernel uses.
ROOM = """
static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) + RAW_Q_BYTES + 8 * (4 * STAGES + 2) +
                      (int)sizeof(Delays) * NOISE_WARPS <= SHARED_BYTES,
              "the delays have no room for their words");
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """One synchronisation taken out: what `file` says, once, and what instead. `way` names the call
    that shows it (`schedule_calls.WAYS`).
    """

    file: str
    said: str
    instead: str
    way: str


def _out(file: str, way: str, before: str, removed: str, after: str = "") -> Fault:
    return Fault(file, before + removed + after, before + after, way)


def _kernel(way: str, before: str, removed: str, after: str = "") -> Fault:
    return _out("attention.cu", way, before, removed, after)


def _copy(way: str, removed: str) -> Fault:
    return _out("attention_copy.cuh", way, "", removed)


_WAIT_K = "        wait(full_k + 8 * stage, phase);\n"
_FREE_K = "        if (speaks) arrive(empty_k + 8 * stage);\n"
_S_DONE = "        mma_wait<0>();\n        hold(S);\n"
_REST = "          if (speaks) {\n"
_REST_K = "          wait(full_k + 8 * stage, phase);\n"
_REST_V = "          wait(full_v + 8 * stage, phase);\n"
FAULTS = {
    # The one who copies.
    "copy: wait for Q empty (codes)": _copy("codes of Q", "    wait(b.empty_q, q_phase ^ 1);\n"),
    "copy: wait for Q empty (raw)": _copy("short", "    wait(b.empty_q, q_phase ^ 1);\n"),
    "copy: wait for K empty": _copy("serial", "      wait(b.empty_k + 8 * stage, phase ^ 1);\n"),
    "copy: wait for V empty": _copy("serial", "      wait(b.empty_v + 8 * stage, phase ^ 1);\n"),
    # Those who compute: waits for what is copied.
    "wait for Q full (raw)": _kernel(
        "serial",
        "",
        "      wait(full_q, q_phase);\n",
        "      q_phase ^= 1;\n      quantise_queries",
    ),
    "wait for Q full (codes)": _kernel("codes of Q", "", "          wait(full_q, q_phase);\n"),
    "serial: wait for K full": _kernel(
        "serial", "        if constexpr (!SCALES_AHEAD) load_scales(masked, tile);\n", _WAIT_K
    ),
    "serial: wait for V full": _kernel(
        "serial",
        "        if constexpr (IN_PLACE && !AT_ONCE) rescale();\n",
        "        wait(full_v + 8 * stage, phase);\n",
    ),
    "first tile: wait for K full": _kernel("overlapped", "        await_queries();\n", _WAIT_K),
    "wait for K full": _kernel("overlapped", "        load_scales(masked, tile);\n", _WAIT_K),
    "wait for V full": _kernel("overlapped", "", "        wait(full_v + 8 * v_stage, v_phase);\n"),
    "last tile: wait for V full": _kernel(
        "overlapped", "#if !SERIAL\n", "      wait(full_v + 8 * stage, phase);\n"
    ),
    "tiles of others: wait for K full": _kernel("causal", "", _REST_K, _REST_V + _REST),
    "tiles of others: wait for V full": _kernel("causal", _REST_K, _REST_V, _REST),
    # Arrivals: without one the ring stands still.
    "serial: arrival at K empty": _kernel(
        "serial", _S_DONE, _FREE_K, "        if constexpr (decltype"
    ),
    "serial: arrival at V empty": _kernel(
        "serial",
        "        other_pieces(stage);\n",
        "        if (speaks) arrive(empty_v + 8 * stage);\n",
    ),
    "first tile: arrival at K empty": _kernel("overlapped", _S_DONE, _FREE_K, "        if (w.low"),
    "arrival at K empty": _kernel(
        "overlapped", "        mma_wait<1>();\n        hold(S);\n", _FREE_K
    ),
    "arrival at V empty": _kernel(
        "overlapped", "", "          if (PIECES == 1 && speaks) arrive(empty_v + 8 * v_stage);\n"
    ),
    "in pieces: arrival at V empty": _kernel(
        "pieces", "", "          if (PIECES > 1 && speaks) arrive(empty_v + 8 * v_stage);\n"
    ),
    "in place: arrival at V empty": _kernel(
        "in place",
        "",
        "          if (speaks) arrive(empty_v + 8 * v_stage);\n",
        "          rescale();",
    ),
    "last tile: arrival at V empty": _kernel(
        "overlapped",
        "      other_pieces(stage);\n",
        "      if (speaks) arrive(empty_v + 8 * stage);\n",
    ),
    "tiles of others: arrival at K empty": _kernel(
        "causal", _REST, "            arrive(empty_k + 8 * stage);\n"
    ),
    "tiles of others: arrival at V empty": _kernel(
        "causal",
        _REST + "            arrive(empty_k + 8 * stage);\n",
        "            arrive(empty_v + 8 * stage);\n",
    ),
    "arrival at Q empty (codes)": _kernel(
        "codes of Q", "", "      if (!RAW_Q && speaks) arrive(empty_q);\n"
    ),
    "arrival at Q empty (raw)": _out(
        "attention_queries.cuh", "serial", "", "  if (lane == 0) arrive(empty);\n"
    ),
    # Products that still read what is released.
    "serial: K released before its product ended": Fault(
        "attention.cu",
        _S_DONE + _FREE_K + "        if constexpr (decltype",
        _FREE_K + _S_DONE + "        if constexpr (decltype",
        "serial",
    ),
    "K released before its product ended": Fault(
        "attention.cu",
        "        mma_wait<1>();\n        hold(S);\n" + _FREE_K,
        _FREE_K + "        mma_wait<1>();\n        hold(S);\n",
        "overlapped",
    ),
    "serial: V released before its product ended": Fault(
        "attention.cu",
        "        issue_values(0, stage);\n        mma_wait<0>();\n        hold_sums();\n"
        "        add_sums(0);\n        other_pieces(stage);\n"
        "        if (speaks) arrive(empty_v + 8 * stage);\n",
        "        issue_values(0, stage);\n        if (speaks) arrive(empty_v + 8 * stage);\n"
        "        mma_wait<0>();\n        hold_sums();\n        add_sums(0);\n"
        "        other_pieces(stage);\n",
        "serial",
    ),
    # Inside a warpgroup and at the start.
    "codes of Q: barrier before they are written": _out(
        "attention_queries.cuh", "short", "", "  meet(consumer);", "  // the last products"
    ),
    "codes of Q: barrier before they are read": _out(
        "attention_queries.cuh", "short", "  share_writes();\n", "  meet(consumer);\n"
    ),
    "codes of Q: fence of writes": _out(
        "attention_queries.cuh", "short", "", "  share_writes();\n"
    ),
    "codes of Q: raw rows released before all lanes have read": _out(
        "attention_queries.cuh", "short", "", "  __syncwarp();\n"
    ),
    "start: barrier behind the making of barriers": _kernel(
        "serial", "", "  __syncthreads();\n", "  wait_for_front();\n"
    ),
    # Launches that overlap.
    "griddepcontrol.wait of the attention": _kernel("serial", "", "  wait_for_front();\n"),
    "griddepcontrol.wait of who waits for statistics": _out(
        "statistics.cuh", "serial", "", "    wait_for_front();\n", "    const uint32_t since"
    ),
    "griddepcontrol.wait of who makes statistics": _out(
        "statistics.cuh", "serial", "", "    wait_for_front();  // it sets the progress to zero\n"
    ),
    # The last round, shared.
    "parts: wait for the flag": Fault(
        "attention_output.cuh",
        "  } while (!__all_sync(~0u, done || gives_up(since)));",
        "  } while (false);",
        "shared",
    ),
    "parts: barrier before the flag": _out(
        "attention_output.cuh", "shared", "  __threadfence();\n", "  meet(me / 128);\n"
    ),
    "parts: fence before the flag": _out(
        "attention_output.cuh", "shared", "", "  __threadfence();\n", "  meet(me / 128);\n"
    ),
    "parts: the flag": _out(
        "attention_output.cuh",
        "shared",
        '"{.reg .pred first; setp.eq.s32 first, %1, 0;"\n               "',
        "@first st.release.gpu.global.s32 [%0], 1;",
        '}"',
    ),
    "parts: zeros of flags": _out(
        "prepass.cu",
        "shared",
        "",
        "  for (i64 i = thread; i < progress_ints; i += (i64)gridDim.x * THREADS)"
        " progress[i] = 0;\n",
    ),
}


def name_of(file: str) -> str:
    """What a made file is called."""
    stem, _, suffix = file.partition(".")
    return f"{stem}_noise.{suffix}"


def texts(fault: Fault | None = None) -> dict[str, str]:
    """The made files by name. Raises ValueError where a source no longer says what is to be
    replaced, or says it more than once.
    """
    made = {file: (FOLDER / file).read_text(encoding="utf-8") for file in EDITED}
    edits = [*EDITS] if fault is None else [*EDITS, (fault.file, fault.said, fault.instead)]
    for file, said, instead in edits:
        if made[file].count(said) != 1:
            raise ValueError(f"{file} says {said!r} {made[file].count(said)} times")
        made[file] = made[file].replace(said, instead)
    for program, header in PROGRAMS.items():
        line = f'#include "{header}"\n'
        made[program] = made[program].replace(line, f'{line}#include "{NOISE.name}"\n', 1)
    made["attention.cu"] += ROOM
    renamed = {name_of(file): text for file, text in made.items()}
    for file in EDITED:
        for name, text in renamed.items():
            renamed[name] = text.replace(f'#include "{file}"', f'#include "{name_of(file)}"')
    return {**renamed, NOISE.name: NOISE.read_text(encoding="utf-8")}


def write(folder: Path, fault: Fault | None = None) -> None:
    """Write the made files."""
    for name, text in texts(fault).items():
        (folder / name).write_text(text, encoding="utf-8")
