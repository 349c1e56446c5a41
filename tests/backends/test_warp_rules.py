"""What threads of a warp do together, none of them may skip: read from the CUDA sources, no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sagepatch.backends

FOLDER = Path(sagepatch.backends.__file__).parent
SOURCES = sorted(
    path
    for folder in ("cuda", "cuda_mma")
    for path in (FOLDER / folder).iterdir()
    if path.suffix in (".cu", ".cuh")
)
# Shuffles and votes of a warp, barriers, products and copies of a warp or a warpgroup.
TOGETHER = re.compile(r"__\w+_sync\(|__syncthreads|__syncwarp|\bbar\.|wgmma|mma\.sync|ldmatrix")
# Functions, and lambdas that have a name.
DEFINED = re.compile(r"\b(\w+)\s*(?:=\s*\[[^\]]*\]\s*)?\([^;{}]*\)\s*(?:const\s*)?\{")
# What follows a name where it is called.
CALLED = r"(?:<[^;{}&|?]*>\s*)?\("
# What stands before parentheses and a brace and is no function.
NO_NAMES = {"if", "for", "while", "switch", "constexpr", "__launch_bounds__"}
# A name in capitals, or its comparison with a number: known when it is compiled.
CONSTANT = re.compile(r"(?:[A-Z][A-Z0-9_]*(?: [<>] \d+)?)?")
# A vote of a warpgroup and nothing else: what stands behind it in a condition runs for all of its
# threads or for none. Behind a vote of a warp other warps may be missing.
VOTE = re.compile(r"all_of_us\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)?")


def bare(text: str) -> str:
    """A source without comments and preprocessor lines, and with one comparison for all."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*#[^\n]*", " ", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"[<>=!]=", "<", text)


def bodies(text: str) -> Iterator[tuple[str, str]]:
    """Name and body of each function."""
    for found in DEFINED.finditer(text):
        if found[1] in NO_NAMES:
            continue
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield found[1], text[found.end() : end]


def together(texts: list[str]) -> set[str]:
    """Functions that do something together, or call one that does."""
    known = [one for text in texts for one in bodies(text)]
    found = {name for name, body in known if TOGETHER.search(body)}
    while True:
        calls = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(found)))})\s*{CALLED}")
        more = {name for name, body in known if calls.search(body)} - found
        if not more or not found:
            return found
        found |= more


def skipped(text: str, shared: set[str]) -> list[str]:
    """Calls of what is done together that an operand in front may keep some threads from: behind
    `&&` and `||`, and in the arms of `?:`.
    """
    names = "|".join([*sorted(shared), r"__\w+_sync"])
    calls = re.compile(rf"\b(?:{names})\s*{CALLED}")
    found = []
    for match in re.finditer(r"&&|\|\||\?", text):
        behind = reach(text[match.end() :], ")]}", "([{", ";,")
        front = reach(text[: match.start()][::-1], "([{", ")]}", ";,=")[::-1]
        if calls.search(behind) and not all(map(is_one_for_all, re.split(r"&&|\|\|", front))):
            found.append(" ".join(f"{front} {match[0]} {behind}".split()))
    return found


def reach(text: str, closing: str, opening: str, ends: str) -> str:
    """The part of an expression up to the parenthesis around it, or to one of `ends`."""
    depth = 0
    for at, letter in enumerate(text):
        if letter in opening:
            depth += 1
        elif letter in closing:
            depth -= 1
        if depth < 0 or (depth == 0 and letter in ends):
            return text[:at]
    return text


def is_one_for_all(operand: str) -> bool:
    """Whether it is known when it is compiled, or the outcome of a vote."""
    operand = re.sub(r"\breturn\b|decltype\(\w+\)::value", "", operand).strip(" !(\n")
    return any(known.fullmatch(operand) for known in (VOTE, CONSTANT))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_operand_keeps_threads_from_what_all_do_together(path: Path) -> None:
    shared = together([bare(source.read_text(encoding="utf-8")) for source in SOURCES])
    assert {"most_score", "meet", "all_of_us", "quantise_queries"} <= shared
    assert not skipped(bare(path.read_text(encoding="utf-8")), shared)


@pytest.mark.parametrize(
    "wrong",
    [
        "if (all_of_us(bound(row) - m0 <= CAP && bound(row + 8) - m1 <= CAP, me)) go();",
        "if (row < rows || bound(row) > 1.0f) go();",
        "const float most = row < rows ? bound(row) : 0.0f;",
        "if (row < rows && __any_sync(~0u, x > 0)) go();",
        "if (__any_sync(~0u, x > 0) && bound(row) > 0) go();",
        "if (all_of_us(x > 0, me) < lane && bound(row) > 0) go();",
        "auto near = [&](int at) { return bound(at) <= CAP; }; if (row < rows && near(row)) go();",
    ],
)
def test_the_rule_finds_what_hung(wrong: str) -> None:
    source = bare(
        "float bound(int row) { float x = row; x += __shfl_xor_sync(~0u, x, 1); return x; }\n"
        f"void kernel() {{ {wrong} }}"
    )
    assert {"bound", "kernel"} <= together([source])
    assert skipped(source, together([source]))


@pytest.mark.parametrize(
    "right",
    [
        "if (LAG > 0 && __any_sync(~0u, x > 0)) go();",
        "if (all_of_us(bound(row) <= CAP, me) && all_of_us(bound(row + 8) <= CAP, me)) go();",
        "const bool under = bound(row) <= CAP; const bool both = under && x > 0;",
    ],
)
def test_the_rule_lets_through_what_all_threads_do(right: str) -> None:
    source = bare(
        "float bound(int row) { float x = row; x += __shfl_xor_sync(~0u, x, 1); return x; }\n"
        f"void kernel() {{ {right} }}"
    )
    assert not skipped(source, together([source]))
