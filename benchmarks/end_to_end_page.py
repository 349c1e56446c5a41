"""Writes docs/end-to-end.md from the measurements beside this file: no number has another source.

python benchmarks/end_to_end_page.py
"""

from __future__ import annotations

from end_to_end_rows import CALIBRATED, HERE, SAFE, UNPATCHED, Measured, measured, read
from page_text import filled
from page_text import table as markdown
from true_models import CASES

PAGE = HERE.parent / "docs" / "end-to-end.md"
# What the fast tier was to reach, set before it was written.
AIMS = {
    "hunyuanvideo_720p_129f": 1.6,
    "wan_14b_720p_81f": 1.4,
    "cogvideox_2b_49f": 1.35,
    "cogvideox_5b_49f": 1.35,
    "flux_2048": 1.2,
    "flux_1024": 1.05,
}
# A measured speed so near to a prediction, or to no change, is the same within a run.
CLOSE = 0.02
# The host is what a forward waits for where it is busy for so much of it.
BUSY = 0.95


def page() -> str:
    """The page's text."""
    found = measured()
    parts = (
        *(_head(found), _speeds(found), _aims(found), _short(found)),
        *(_time(found), _clocks(), _predictions(found)),
    )
    return "\n\n".join(map(filled, parts)) + "\n"


def _head(found: list[Measured]) -> str:
    rows = [row for one in found for row in one.rows.values()]
    facts = {(r["gpu"], r["torch"], r["driver"]) for r in rows}
    machines = "; ".join(f"{gpu}, torch {torch}, driver {driver}" for gpu, torch, driver in facts)
    return f"""
# Whole forwards on an H200

One forward of true architectures at their published sizes, bf16: denoisers without text encoder and
VAE, and a language model's reading of a prompt. Weights are random, so this page is about time; how
much quality a kernel costs is measured elsewhere ([quality](quality.md)). {machines}.

`python benchmarks/h200_end_to_end.py` wrote
[h200_end_to_end.csv](../benchmarks/h200_end_to_end.csv) and
[h200_end_to_end_parts.csv](../benchmarks/h200_end_to_end_parts.csv); each row there names its
commit and command. `--compile` compiles each block by itself, with the patch and without. Where one
forward of the whole model takes many seconds, some of its layers were kept, all alike; the name
says how many. Forwards of all modes take turns, each mode first in turn, so that a GPU that grows
warm or a busy host favours none. A time is written only if the output agrees with the unpatched
one.

- unpatched: torch's default attention, which is cuDNN's here.
- calibrated: the plan of two forwards at the default threshold, on smaller inputs of the same model
  where the mode says so.
- safe: the safe tier in every layer, whether it is faster there or not.

![speed of one forward](../benchmarks/h200_end_to_end.png)
"""


def _speeds(found: list[Measured]) -> str:
    def cell(one: Measured, mode: str) -> str:
        return one.told(mode) if mode in one.rows else "not run"

    lines = [
        (
            f"`{one.name}`" + one.model[len(one.name) :],
            "yes" if one.compiled else "no",
            f"{one.unpatched_ms:.0f}",
            cell(one, CALIBRATED),
            cell(one, SAFE),
            one.rows[UNPATCHED]["commit"],
        )
        for one in found
    ]
    head = ("model", "compiled", "unpatched, ms", "calibrated", "safe", "commit")
    return f"""
## Speeds

{markdown(head, lines)}

Not run: {_not_run(found)}.
"""


def _not_run(found: list[Measured]) -> str:
    """What of the cases has no time."""
    plain, compiled = ({one.name for one in found if one.compiled == how} for how in (False, True))
    safe = [one.name for one in found if SAFE not in one.rows]
    told = [f"`{case.name}`" for case in CASES if case.name not in plain]
    left = [f"`{case.name}`" for case in CASES if case.name not in compiled]
    told += [f"the safe tier of `{name}`" for name in safe]
    told += ["compiled: " + ", ".join(left)] if left else []
    return "; ".join(told) or "nothing"


def _aims(found: list[Measured]) -> str:
    lines = [(_aim(one)) for one in found if one.name in AIMS and CALIBRATED in one.rows]
    slow = [
        f"`{one.name}`{' compiled' if one.compiled else ''} ({one.speedup():.3f}x{_host(one)})"
        for one in found
        if CALIBRATED in one.rows and one.speedup() < 1
    ]
    told = "never in these rows" if not slow else "not kept: " + ", ".join(slow)
    head = ("model", "compiled", "aim", "measured", "of the aim", "what binds")
    return f"""
## Against the aims

The aims were set from attention's share before the kernels were written. "Needs" is how much faster
attention would have to be, at the share that it has in this forward, for the aim; "had" is how much
faster it was if all that the forward gained is attention's; "alone" is how much faster its kernels
are, quantising included, guard and the model around them not.

{markdown(head, lines)}

The last aim, that a calibrated model is never slower than unpatched: {told}.
"""


def _host(one: Measured) -> str:
    """What the host has to do with a forward that became slower, as far as it was timed."""
    if CALIBRATED not in one.parts or UNPATCHED not in one.parts:
        return ""
    before, after = (float(one.parts[mode]["host_ms"]) for mode in (UNPATCHED, CALIBRATED))
    return f"; the host is busy for {after:.0f} ms, unpatched for {before:.0f}"


def _aim(one: Measured) -> tuple[str, ...]:
    aim, speed = AIMS[one.name], one.speedup()
    verdict = "met" if speed >= aim else binds(one, aim)
    compiled = "yes" if one.compiled else "no"
    cells = (f"{aim:.2f}x", f"{speed:.3f}x", f"{speed / aim:.3f}", verdict)
    return (f"`{one.name}`", compiled, *cells)


def binds(one: Measured, aim: float) -> str:
    """Why a forward is not as fast as was aimed at."""
    share, gain, alone = one.share, one.attention_gain(), one.kernels_gain()
    if share is None or gain is None or alone is None:
        return "missed; attention was not timed in place"
    rest = 1 / aim - (1 - share)
    told = f"missed: attention is {share:.0%}"
    if rest <= 0:
        return f"{told}; the aim is out of reach even were it free ({1 / (1 - share):.2f}x)"
    needed = share / rest
    told += f", needs {needed:.2f}x, had {gain:.2f}x, alone {alone:.2f}x"
    host_ms = float(one.parts[CALIBRATED]["host_ms"])
    if host_ms > BUSY * float(one.rows[CALIBRATED]["ms_median"]):
        return f"{told}; the host is busy to the end"
    if alone >= needed:
        return f"{told}: guard, host and clocks take the rest"
    return f"{told}: the kernel's speed at this shape"


def _short(found: list[Measured]) -> str:
    """What a patch does to SDXL, whose calls are short."""
    (sdxl,) = (one for one in found if one.name == "sdxl_1024" and not one.compiled)
    (busy,) = measured(name="h200_end_to_end_busy_host")
    calls = sum(sdxl.calls(UNPATCHED).values())
    exact = sdxl.calls(CALIBRATED).get("sdpa.exact", 0)
    taken = calls - busy.calls(CALIBRATED).get("sdpa.exact", 0)
    rows = read(HERE / "h200_sdxl.csv")
    alone = {row["step"]: row for row in rows if row["step"]}
    ms = {step: float(row["ms"]) for step, row in alone.items()}
    # Step 4 is the calibrated model, 5 the one that was restored right after it.
    assert (alone["4"]["mode"], alone["5"]["mode"]) == (CALIBRATED, "restored")
    return f"""
## SDXL: short calls

A forward of SDXL is {calls} short calls, and the host is what it waits for: busy for
{sdxl.host_ms(UNPATCHED):.0f} of {sdxl.unpatched_ms:.0f} ms before any patch, while its attention
timed alone takes {float(sdxl.parts[UNPATCHED]["attention_alone_ms"]):.0f} ms. Calibrated,
{"all" if exact == calls else exact} of its layers stay exact, and such layers hand their calls to
torch as they came: it takes the time of the unpatched model. (An earlier plan, at
{busy.rows[UNPATCHED]["commit"]}, took {taken} calls and was {busy.speedup():.2f}x, on a host that
tests shared: [csv](../benchmarks/h200_end_to_end_busy_host.csv).)

With nothing else on the host ([csv](../benchmarks/h200_sdxl.csv), {alone["4"]["commit"]}):
calibrated {ms["4"]:.1f} ms, the model restored right after it {ms["5"]:.1f} ms. In that process the
host's own speed moved by more than that: unpatched {ms["1"]:.0f} ms at first, {ms["3"]:.0f} ms
before the calibration and {ms["8"]:.0f} ms at the end. Why it was slower after the calibration,
patched or restored, was not found; only neighbours compare. A kernel forced on every layer makes
such a model slower: `cuda.sage2_8` {ms["7"]:.0f} ms, exact right before it {ms["6"]:.0f} ms. Leave
the choice to the calibration.

The rows of SDXL on this page, at {sdxl.rows[UNPATCHED]["commit"]}, are of a host with nothing
else to do. One forward in five took less and one in five more than: unpatched
{_spread(sdxl, UNPATCHED)}, calibrated {_spread(sdxl, CALIBRATED)}, the same within that. The safe
tier quantises every call, which the host pays for: {_spread(sdxl, SAFE)},
{sdxl.speedup(SAFE):.2f}x.
"""


def _spread(one: Measured, mode: str) -> str:
    row = one.rows[mode]
    return f"{float(row['ms_p20']):.1f} and {float(row['ms_p80']):.1f} ms"


def _clocks() -> str:
    rows = read(HERE / "h200_end_to_end_clocks.csv")
    hardest = max(rows, key=lambda row: float(row["power_w"]))
    # Power is a mean over the last second or so: the last ones are of the forwards alone.
    last = [int(row["clock_mhz"]) for row in rows[-6:]]
    highest = max(int(row["clock_mhz"]) for row in rows)
    return f"""
## The chip's clocks

While compiled FLUX forwards ran one after another (unpatched and patched in turn) the GPU drew up
to {float(hardest["power_w"]):.0f} W and ran at {min(last)} to {max(last)} MHz, of {highest}
([h200_end_to_end_clocks.csv](../benchmarks/h200_end_to_end_clocks.csv)). A kernel timed alone, in
short bursts, has the higher clock. This is the likely reason why FLUX at 2048 gains more than its
kernels timed alone save; that 8-bit attention draws less and leaves the rest a higher clock was not
measured.
"""


def _time(found: list[Measured]) -> str:
    lines = []
    for one in found:
        for mode, part in one.parts.items():
            total = float(one.rows[mode]["ms_median"])
            alone = float(part["attention_alone_ms"])
            attention = one.attention_ms(mode) if mode == UNPATCHED else None
            lines.append(
                (
                    f"`{one.name}`" + one.compiled * ", compiled",
                    mode,
                    f"{total:.0f}",
                    "-" if attention is None else f"{attention:.0f}",
                    f"{alone:.0f}",
                    f"{total - alone:.0f}",
                    f"{float(part['host_ms']):.0f}",
                    part["calibration_s"] or "-",
                    part["rel_error"],
                    part["kernels"].replace("; ", ", ") or "-",
                )
            )
    head = (
        *("model", "mode", "forward, ms", "attention in place", "attention alone", "the rest"),
        *("host busy", "calibrating, s", "error", "calls by kernel"),
    )
    return f"""
## Where the time goes

Attention in place: the sum over layers, each between two events in an unpatched forward of its own.
Attention alone: each kind of call repeated by itself afterwards, of patched forwards too. The rest:
the forward without attention alone; where it shrinks with a patch the whole chip runs faster, where
it grows the guard, the host or the clocks take it. Host busy: when the last launch had been handed
over; near the forward's whole time it may be the host that the GPU waits for, or a full queue that
the host waits for. Error: of the whole output against unpatched, root mean square, relative; random
weights exaggerate it, a language model's most.

{markdown(head, lines)}
"""


def _predictions(found: list[Measured]) -> str:
    lines, off = [], []
    for one in found:
        for mode in (CALIBRATED, SAFE):
            if mode not in one.rows:
                continue
            speed, predicted = one.speedup(mode), one.predicted(mode)
            off.append(abs(predicted / speed - 1))
            told = "as predicted" if off[-1] <= CLOSE else f"{predicted / speed - 1:+.1%}"
            name = f"`{one.name}`" + one.compiled * ", compiled"
            lines.append((name, mode, f"{predicted:.3f}x", f"{speed:.3f}x", told))
    within = sum(one <= CLOSE for one in off)
    return f"""
## Predicted against measured

The prediction takes what the kernels save, timed alone, from the unpatched time: what a report
says of the whole. Of {len(off)} predictions {within} are within {CLOSE:.0%} of what was measured,
the worst is off by {max(off):.0%}, the median by {sorted(off)[len(off) // 2]:.1%}.

{markdown(("model", "mode", "predicted", "measured", "prediction is off by"), lines)}

[How a layer gets its kernel](calibration.md) · [CUDA kernels](kernels-cuda.md) ·
[quality](quality.md)
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
