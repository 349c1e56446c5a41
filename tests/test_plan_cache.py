"""Plans kept on disk: found again only where everything is as it was, stale ones named."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from models.layers import entry, machine
from models.stacks import stack, tokens

import sagepatch
from sagepatch import patch as patches
from sagepatch import plan_cache
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.plan import Plan
from sagepatch.plan_cache import MOST_KEPT, cached_plan, keep_plan, stale_plans

GPU = machine("NVIDIA H200")
OLD = replace(GPU, versions={**GPU.versions, "torch": "1.13"})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def plan(on=GPU, variant: str = "triton.sage2_8", threshold: float = 0.998, **changes) -> Plan:
    made = Plan("mark", "Model", threshold, False, on.gpu_name, dict(on.versions), ())
    return replace(made, entries=(entry("a", variant),), **changes)


def test_a_kept_plan_is_found_again_by_all_that_it_depends_on(folder) -> None:
    keep_plan(plan(), GPU)
    assert cached_plan("mark", GPU, 0.998) == plan()
    assert cached_plan("other", GPU, 0.998) is None
    assert cached_plan("mark", GPU, 0.999) is None
    assert cached_plan("mark", machine("NVIDIA A100"), 0.998) is None
    assert cached_plan("mark", OLD, 0.998) is None
    assert cached_plan("mark", machine(), 0.998) is None
    assert [path.name[:5] for path in folder.iterdir()] == ["mark-"]


def test_a_plan_of_other_versions_is_named_not_used() -> None:
    keep_plan(plan(OLD), OLD)
    assert cached_plan("mark", GPU, 0.998) is None
    (told,) = stale_plans("mark", GPU, 0.998)
    here = GPU.versions["torch"]
    assert told.startswith(f"a kept plan is not used, it was made with torch 1.13 (here {here}): ")
    assert stale_plans("mark", GPU, 0.9) == []
    assert stale_plans("mark", machine("NVIDIA A100"), 0.998) == []
    assert stale_plans("mark", machine(), 0.998) == []


def test_a_plan_of_another_version_of_a_kernel_is_named_not_used(monkeypatch) -> None:
    keep_plan(plan(), GPU)
    name = "triton.sage2_8"
    newer = {**BY_NAME, name: replace(BY_NAME[name], numerics_version=2)}
    monkeypatch.setattr(plan_cache, "BY_NAME", newer)
    assert cached_plan("mark", GPU, 0.998) is None
    (told,) = stale_plans("mark", GPU, 0.998)
    assert f"version 1 of {name} (here version 2)" in told
    del newer[name]
    assert f"version 1 of {name} (here gone)" in stale_plans("mark", GPU, 0.998)[0]
    # A kernel that the plan does not name.
    newer = {**BY_NAME, "sdpa.exact": replace(BY_NAME["sdpa.exact"], numerics_version=2)}
    monkeypatch.setattr(plan_cache, "BY_NAME", newer)
    assert "other versions of the kernels" in stale_plans("mark", GPU, 0.998)[0]


def test_versions_side_by_side_keep_their_plans_but_not_for_ever(folder) -> None:
    for number in range(MOST_KEPT + 3):
        on = replace(GPU, versions={**GPU.versions, "torch": str(number)})
        keep_plan(plan(on), on)
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (time.time() + number, time.time() + number))
    assert len(list(folder.iterdir())) == MOST_KEPT
    assert cached_plan("mark", on, 0.998) == plan(on)
    other = plan(threshold=0.9)
    keep_plan(other, GPU)
    assert len(list(folder.iterdir())) == MOST_KEPT + 1


def test_what_cannot_be_read_is_a_warning(folder, caplog) -> None:
    keep_plan(plan(), GPU)
    keep_plan(plan(OLD), OLD)
    for path in folder.iterdir():
        path.write_text("{")
    assert cached_plan("mark", GPU, 0.998) is None
    assert stale_plans("mark", GPU, 0.998) == []
    assert caplog.text.count("a kept plan is not used: ") == 2


def test_a_plan_that_another_process_takes_away_meanwhile_is_no_warning(folder, caplog) -> None:
    keep_plan(plan(OLD), OLD)
    (kept,) = folder.iterdir()
    # Listed by its name, and no longer there when it is looked at.
    gone = kept.with_name(f"{kept.name.rpartition('-')[0]}-gone.json")
    gone.symlink_to(folder / "nowhere")
    keep_plan(plan(), GPU)
    assert len(stale_plans("mark", GPU, 0.998)) == 1
    assert cached_plan("mark", GPU, 0.998) == plan()
    assert not caplog.text


def test_plans_of_emulations_and_of_other_gpus_are_not_kept(folder) -> None:
    keep_plan(plan(emulated=True), GPU)
    keep_plan(plan(gpu="another"), GPU)
    assert not folder.exists() or not list(folder.iterdir())


def test_a_report_names_the_stale_plan(monkeypatch) -> None:
    monkeypatch.setattr(patches.Machine, "here", classmethod(lambda cls: OLD))
    model, x = stack(1), tokens()
    with torch.no_grad(), sagepatch.apply(model) as patch:
        keep_plan(replace(plan(OLD), fingerprint=patch.fingerprint), OLD)
        monkeypatch.setattr(patches.Machine, "here", classmethod(lambda cls: GPU))
        newer = sagepatch.apply(model)
        model(x)
        assert any("it was made with torch 1.13" in told for told in newer.report().warnings)
