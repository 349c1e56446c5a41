"""What `sagepatch.apply` and `sagepatch.calibrate` refuse, and that they say why."""

from __future__ import annotations

import pytest
from models.stacks import stack, tokens

import sagepatch
from sagepatch.errors import InvalidArgument, VariantRefused
from sagepatch.patch import patches_on


# Once wrong: a bare TypeError from deep inside, or "no" taken for yes.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, ["x"]) for name in ("plan", "variant", "threshold", "guard", "strict", "emulate")),
        *((name, "no") for name in ("strict", "emulate")),
        *(("components", value) for value in (5, [["transformer"]], {3}, [None, "unet"])),
        *(("plan", value) for value in ({"entries": []}, 3)),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(name: str, value) -> None:
    model = stack()
    kind = VariantRefused if name == "variant" else InvalidArgument
    with pytest.raises(kind, match=name):
        sagepatch.apply(model, **{name: value})
    assert patches_on([model]) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("components", value) for value in (5, [["transformer"]])),
        *(("table", value) for value in (["t.json"], 3)),
        ("emulate", "no"),
        ("run", "pipe"),
        ("prompts", 3),
    ],
)
def test_a_calibration_refuses_arguments_of_a_wrong_kind_by_name(name: str, value) -> None:
    model = stack()
    given = {"run": lambda: model(tokens()), name: value}
    if name == "prompts":
        del given["run"]
    with pytest.raises(InvalidArgument, match=name):
        sagepatch.calibrate(model, **given)
