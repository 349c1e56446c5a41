"""`sagepatch inspect`: what would be patched in a model and what not, what attention costs and what
patching can gain, from its configs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, progress, table, tell
from sagepatch.cli.forward_cost import Gain, gain
from sagepatch.cli.forward_count import PROMPT_TOKENS, Asked, Counted, count, heeded
from sagepatch.cli.loading import config_file, library_of, read_json
from sagepatch.cli.skeleton import demo_folder, skeleton
from sagepatch.cli.sources import Source, resolve
from sagepatch.errors import InvalidArgument, NothingPatched
from sagepatch.patchers.model import fingerprint, search

# Columns in which whole names of layers have room beside the rest.
WIDE = 110


@dataclass(frozen=True, slots=True)
class Row:
    """One attention layer. `heads` and `head_dim` are None where the module does not say, `shape`
    and `share` (of all operations of one forward, 0 to 1) where no forward could be counted.
    """

    name: str
    kind: str
    patched_by: str | None
    heads: int | None
    head_dim: int | None
    reason: str
    shape: str | None = None
    share: float | None = None


def inspect(
    model: o.Model,
    component: Annotated[
        list[str] | None, typer.Option(help="A part to look at instead of the denoisers; repeat.")
    ] = None,
    width: o.Width = None,
    height: o.Height = None,
    frames: o.Frames = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help=f"Tokens of a language model's prompt. [default: {PROMPT_TOKENS}]"
        ),
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict/--no-predict", help="Time the kernels on this GPU and predict the gain."
        ),
    ] = True,
    as_json: o.AsJson = False,
) -> None:
    """List the attention layers of a model: what would be patched, what not and why, and what
    attention costs.

    On a GPU it tells what patching can gain at most, too. Reads the configs only: no weights are
    loaded or fetched.
    """
    source = resolve(model)
    given = Asked(height, width, frames, None, tokens)
    with progress(f"reading the configs of {model}"):
        parts = skeleton(source, component or None)
        found = search(parts)
    check_heeded(parts.modules, given)
    with progress("counting one forward on shapes alone"):
        sizes = asked(source, given)
        counted = count(parts.modules, found.sites, sizes)
    reached = [site.name for site in found.sites]
    gains: list[Gain | None] = [None] * len(counted)
    has_gpu = torch.cuda.is_available()
    if predict and has_gpu:
        gains = [_gain(one, reached) for one in counted]
    rows = [
        Row(
            site.name,
            site.kind,
            site.patcher,
            *heads_of(site.module),
            "",
            *_attention(site.name, counted),
        )
        for site in found.sites
    ]
    rows += [Row(left.name, left.kind, None, None, None, left.reason) for left in found.left]
    if as_json:
        print_json(
            {
                "model": parts.label,
                "fingerprint": fingerprint(parts, found),
                "layers": [asdict(row) for row in rows],
                "forward": [
                    _as_json(one, reached, won) for one, won in zip(counted, gains, strict=True)
                ],
            }
        )
    else:
        where = ", ".join(name for name in parts.modules if name)
        tell(
            f"{parts.label}{f' ({where})' if where else ''}: {len(rows)} attention layers, "
            f"{len(found.sites)} would be patched, {len(found.left)} left alone",
            style="bold",
        )
        show(rows)
        for one, won in zip(counted, gains, strict=True):
            for line in told(one, reached, won, has_gpu):
                tell(line)
    if not found.sites:
        raise NothingPatched(f"nothing in {parts.label} can be patched")


def show(rows: list[Row]) -> None:
    """The layers as a table."""
    from rich.text import Text

    from sagepatch.report.render_table import shared_path

    counted = any(row.shape is not None for row in rows)
    left = any(row.reason for row in rows)
    console = out()
    narrow = console.width < WIDE
    # In a narrow terminal what all names begin with goes into the title, and a call's shape says
    # the heads.
    shared = shared_path([row.name for row in rows]) if narrow else ""
    first = f"layer of {shared[:-1]}" if shared else "layer"
    shaped = narrow and all(row.shape is not None for row in rows)
    titles = [first, "kind", *([] if shaped else ["heads"])]
    titles += [*(["one call", "share"] if counted else []), "reached by"]
    made = table(*titles, *(["left alone because"] if left else []))
    for row in rows:
        heads = "" if row.heads is None else f"{row.heads} x {row.head_dim}"
        cells = [row.name.removeprefix(shared), row.kind, *([] if shaped else [heads])]
        if counted:
            cells += [row.shape or "", "" if row.share is None else f"{row.share:.1%}"]
        cells += [row.patched_by or "", *([row.reason] if left else [])]
        made.add_row(*map(Text, cells))
    console.print(made)


def told(one: Counted, reached: Sequence[str], won: Gain | None, has_gpu: bool) -> list[str]:
    """What one forward costs and what patching can gain, in sentences."""
    name = f"{one.part}: " if one.part else ""
    if one.cost is None:
        return [f"{name}the share of attention is not known: {one.why_not}."]
    tera = f"{one.cost.total / 1e12:.3g} tera-operations"
    lines = [
        f"{name}one forward at {one.size}: {tera}, {one.cost.share():.0%} of them in attention, "
        f"{one.cost.share(reached):.0%} in layers that would be patched."
    ]
    if won is None:
        why = "--no-predict times no kernel" if has_gpu else "no GPU here to time kernels on"
        return [*lines, f"{name}what that gains is not predicted: {why}."]
    return [
        *lines,
        f"{name}on this GPU attention is at most {won.share:.0%} of the time of a forward; by "
        f"Amdahl's law, with kernels timed here on these shapes, patching makes it at most "
        f"{won.fast:.2f}x as fast where fast kernels are accurate enough, {won.safe:.2f}x where "
        "only safe ones are.",
    ]


def check_heeded(parts: Mapping[str, nn.Module], given: Asked) -> None:
    """Refuse sizes that no part of the model has: its forward would be the same without them."""
    sizes = ("width", "height", "frames", "tokens")
    asked = [size for size in sizes if getattr(given, size) is not None]
    takes = [heeded(part) for part in parts.values()] if asked else []
    for size in asked:
        # Of a part whose forward is not known the count says so itself.
        if any(each is None or size in each for each in takes):
            continue
        names = " or ".join(type(part).__name__ for part in parts.values()) or "this model"
        known = dict.fromkeys(f"--{one}" for each in takes for one in sorted(each or ()))
        raise InvalidArgument(
            f"--{size} says nothing about {names}"
            + (f", whose forward takes {', '.join(known)}" if known else "")
        )


def asked(source: Source, given: Asked) -> Asked:
    """The size that is meant: the user's, else the demo's or that of the preset's documentation."""
    if source.is_demo:
        from sagepatch.demo.loader import DEFAULTS

        usual = Asked(DEFAULTS.height, DEFAULTS.width, None, DEFAULTS.max_sequence_length)
    else:
        call = {} if source.preset is None else source.preset.call
        names = ("height", "width", "num_frames", "max_sequence_length")
        usual = Asked(*(int(call[name]) if name in call else None for name in names))
    return Asked(
        given.height or usual.height,
        given.width or usual.width,
        given.frames or usual.frames,
        usual.text,
        given.tokens,
        _vae_scale(source),
    )


def _vae_scale(source: Source) -> int | None:
    """How many pixels wide a latent is, where the pipeline's autoencoder is of the usual kind."""
    folder = demo_folder(source)
    if library_of(folder) != "pipeline":
        return None
    path = config_file(folder, "vae/config.json")
    config = {} if path is None else read_json(folder, path)
    stages = config.get("block_out_channels")
    usual = config.get("_class_name") == "AutoencoderKL" and isinstance(stages, list)
    return 2 ** (len(stages) - 1) if usual and stages else None


def _attention(name: str, counted: Sequence[Counted]) -> tuple[str | None, float | None]:
    """A layer's calls and its share of its part's operations."""
    for one in counted:
        if one.cost is not None and name in one.shapes:
            shapes = dict.fromkeys(map(str, one.shapes[name]))
            return ", ".join(shapes), one.cost.share([name])
    return None, None


def _gain(one: Counted, reached: Sequence[str]) -> Gain | None:
    from sagepatch.cli.forward_times import measured, rate

    if one.cost is None:
        return None
    device = torch.device("cuda")
    shapes = list(dict.fromkeys(shape for calls in one.shapes.values() for shape in calls))
    with progress("timing kernels on these shapes") as step:
        done = iter(range(1, len(shapes) + 1))
        times = measured(shapes, device, lambda: step(next(done), len(shapes)))
        return gain(one.cost, reached, times, rate(device))


def _as_json(one: Counted, reached: Sequence[str], won: Gain | None) -> dict[str, Any]:
    counted = one.cost
    return {
        "part": one.part,
        "size": one.size,
        "operations": None if counted is None else counted.total,
        "attention_share": None if counted is None else counted.share(),
        "patched_share": None if counted is None else counted.share(reached),
        "why_not": one.why_not,
        "gain": None if won is None else asdict(won),
    }


def heads_of(module: nn.Module) -> tuple[int | None, int | None]:
    """Query heads and head size, from the names that attention modules use for them."""
    config = getattr(module, "config", None)
    heads = _first_int(module, "heads", "num_heads", "n_heads", "num_attention_heads")
    heads = heads or _first_int(config, "num_attention_heads")
    size = _first_int(module, "head_dim", "dim_head", "attention_head_dim", "attention_head_size")
    inner = _first_int(module, "inner_dim", "embed_dim", "all_head_size")
    if size is None and heads and inner:
        size = inner // heads
    return (heads, size) if heads and size else (None, None)


def _first_int(owner: object, *names: str) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
