"""The section of docs/ablations.md that holds the papers' accuracy tables, from papers_tables.csv.
benchmarks/ablation_page.py writes the page.
"""

from __future__ import annotations

import csv
from pathlib import Path

from page_text import table as markdown

TABLE = Path(__file__).with_name("papers_tables.csv")


def rows() -> list[dict[str, str]]:
    """Every line of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def papers() -> str:
    """The section, as Markdown to be filled."""
    lines = []
    last = ""
    for r in rows():
        theirs = [r["theirs_cosine"] or "-", r["theirs_rel_l1"] or "-", r["theirs_rmse"] or "-"]
        named = f"{r['paper']}, {r['table']}"
        lines.append(
            (
                "" if named == last else named,
                r["setting"],
                r["data"] + (" (worst head)" if r["over"] == "worst" else ""),
                "-" if set(theirs) == {"-"} else " / ".join(theirs),
                f"{r['cosine']} / {r['rel_l1']} / {r['rmse']}",
            )
        )
        last = named
    head = ("paper, table", "setting", "our data", "theirs: cosine / rel. L1 / RMSE", "ours")
    return f"""
## The papers' accuracy tables, ours beside theirs

`python benchmarks/papers_tables.py` ([csv](../benchmarks/papers_tables.csv)), emulated on a CPU.
Theirs are on the layers of Llama2, Unidiffuser and CogVideoX, which are not published; ours on the
demo's layers, on normal data, and on stand-ins for their outlier layers: "K + c n" is normal data
whose keys share c times a normal vector, in "Q + 3 n, K + 16 n" queries share another, "spikes" has
one entry in a thousand of ten sigma. "-" is not printed. Rows of arXiv 2411.10958 have INT4 Q and
K.

{markdown(head, lines)}

The order of the rows holds, the sizes differ with the data; but for INT4 (2411.10958) not
everywhere. {_four_bits()} The demo's layers are milder than their
worst: INT8 P and V fall to a cosine of 0.564 there and not here; where P is normalised before it is
rounded, normal data bring it down here too. RMSE is in the units of an output and compares only
between neighbours. The RMSE printed for vT and vB is on another scale than that of T and B in the
same table. Table 17 of arXiv 2410.02367 here is Q K^T less each row's mean, which is what softmax
sees: with the mean
in it a cosine says nothing. Metrics of whole pictures and texts (FID, perplexity) need those
models; the demo's pictures by recipe are in
[demo_recipes.csv](../benchmarks/demo_recipes.csv). More of theirs and ours: [the
arithmetic](numerics.md).

[The arithmetic](numerics.md) · [machine code](machine-code.md) · [recipes](recipes/README.md)
"""


def _four_bits() -> str:
    """Where the rows of SageAttention2 stand otherwise here than there."""
    found = {
        (r["table"].partition(",")[0], r["setting"]): r
        for r in rows()
        if r["paper"] == "arXiv 2411.10958"
    }

    def l1(table: str, *settings: str) -> str:
        return ", ".join(f"{float(found[table, one]['rel_l1']):.3f}" for one in settings)

    return f"""On a layer whose queries and keys both have a common vector (Table 17) smoothing
either helps and both together bring it back (relative L1 as they are, K, Q, both:
{l1("Table 17", "as they are", "K smoothed", "Q smoothed", "Q and K smoothed")}), and rotation does
not, as there; K matters more here, Q there, as the sizes of the two were our choice. The demo's
layers have next to no such vectors: INT4 as it is errs by {l1("Table 4", "as they are")} there and
with both smoothed by {l1("Table 4", "Q and K smoothed")}, and rotating does better than smoothing
({l1("Table 4", "rotated")}). A scale per thread, as good as one per token in Table 6, is between
token and block here ({l1("Table 6", "per token", "per thread", "per block", "per tensor")}). INT8 P
and V, which Tables 7 and 16 rule out, cost the demo little, as before."""
