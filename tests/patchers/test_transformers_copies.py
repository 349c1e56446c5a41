"""Copies, pickles and saved files of patched transformers models are those of the unpatched model,
and a config stays what it is by type.
"""

from __future__ import annotations

import copy
import filecmp
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.transformers_models import first_output, tiny_bert, tiny_llama
from torch import nn

import sagepatch


def _patch(model: nn.Module, variant: str = "sage2_8") -> sagepatch.Patch:
    return sagepatch.apply(model, variant=variant, emulate=True)


def _quantised(patch: sagepatch.Patch) -> int:
    return sum(layer.record.by_variant.get("emulated.sage2_8", 0) for layer in patch.layers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_deep_copy_is_unpatched(implementation: str) -> None:
    # case 40
    model, inputs = tiny_llama(attn_implementation=implementation)
    plain = first_output(model, inputs)
    patch = _patch(model)
    twin = copy.deepcopy(model)
    assert twin.config._attn_implementation == implementation
    assert torch.equal(first_output(twin, inputs), plain)
    assert _quantised(patch) == 0
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert torch.equal(first_output(twin, inputs), 2 * plain)
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)
    # The copy can be patched on its own, and comes back to what the first model ran.
    with _patch(twin) as own:
        first_output(twin, inputs)
        assert _quantised(own) == 3
    assert twin.config._attn_implementation == implementation


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_config_holds_what_it_held_by_type(implementation: str) -> None:
    # torch 2.11 compiles no look-up of a subclass of str
    model, _ = tiny_llama(attn_implementation=implementation)
    before = {name: type(value) for name, value in vars(model.config).items()}
    _patch(model)
    assert model.config._attn_implementation != implementation
    assert {name: type(value) for name, value in vars(model.config).items()} == before


def test_copies_after_a_newer_choice_of_the_user_keep_it() -> None:
    # case 36
    model, _ = tiny_llama()
    patch = _patch(model)
    model.set_attn_implementation("eager")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.config._attn_implementation == "eager"
        assert all(vars(module).get("_sagepatch") is None for module in twin.modules())
    patch.restore()


def test_a_copy_of_one_block_is_unpatched() -> None:
    model, _ = tiny_llama()
    with _patch(model):
        for twin in (
            copy.deepcopy(model.model.layers[1]),
            pickle.loads(pickle.dumps(model.model.layers[1])),
        ):
            assert twin.self_attn._sagepatch is None
            assert twin.self_attn.config._attn_implementation == "sdpa"
            assert twin.self_attn.config is not model.config
        assert model.config._attn_implementation == "sagepatch"


def test_a_model_from_a_patched_config_is_unpatched() -> None:
    model, inputs = tiny_llama()
    plain = first_output(model, inputs)
    patch = _patch(model)
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(first_output(twin, inputs), plain)
    assert _quantised(patch) == 0


def test_a_pickle_needs_no_sagepatch(tmp_path: Path) -> None:
    # case 40
    model, inputs = tiny_bert()
    plain = first_output(model, inputs)
    patch = _patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(first_output(twin, inputs), plain)
    assert _quantised(patch) == 0
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, inputs, plain)))
    assert _alone(
        "import pickle\n"
        "model, inputs, plain = pickle.load(open(sys.argv[1] + '/model.pickle', 'rb'))\n"
        "with torch.no_grad(): print(torch.equal(model(**inputs).last_hidden_state, plain))",
        tmp_path,
    )


def test_saved_files_are_those_of_the_model(tmp_path: Path) -> None:
    # case 40
    model, inputs = tiny_bert()
    plain = first_output(model, inputs)
    model.save_pretrained(tmp_path / "before")
    _patch(model)
    model.save_pretrained(tmp_path / "patched")
    files = [path.name for path in (tmp_path / "before").iterdir()]
    same, *_ = filecmp.cmpfiles(tmp_path / "before", tmp_path / "patched", files, shallow=False)
    assert sorted(same) == sorted(files)
    torch.save((inputs, plain), tmp_path / "expected.pt")
    assert _alone(
        "from transformers import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1] + '/patched').eval()\n"
        "inputs, plain = torch.load(sys.argv[1] + '/expected.pt')\n"
        "with torch.no_grad(): print(torch.equal(model(**inputs).last_hidden_state, plain))",
        tmp_path,
    )


def _alone(code: str, folder: Path) -> bool:
    """What `code` prints in a process that has no sagepatch."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, torch; sys.modules['sagepatch'] = None\n" + code,
            folder,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip() == "True"
