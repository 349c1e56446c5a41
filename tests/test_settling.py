"""A layer is settled once: whoever comes second, in another thread, changes nothing."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from models.layers import entry
from models.stacks import stack, tokens
from torch import Tensor, nn

import sagepatch
from sagepatch import patch as patches
from sagepatch.calibration import capture
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.capture import SAMPLED_CALLS
from sagepatch.patch import Patch


def frozen() -> tuple[nn.Module, Tensor]:
    """Layers with gradients run exact, and threads start with gradients on."""
    return stack(2).requires_grad_(False), tokens()


def unsettled(monkeypatch) -> tuple[nn.Module, Tensor, Patch, Counter[str]]:
    """A patched stack before its last sampled call, and how often each layer is settled."""
    counts: Counter[str] = Counter()
    made = patches.entry_at

    def counted(table, *given, **more):
        counts[table.site] += 1
        return made(table, *given, **more)

    monkeypatch.setattr(patches, "entry_at", counted)
    model, x = frozen()
    patch = sagepatch.apply(model, emulate=True)
    for _ in range(SAMPLED_CALLS[-1] - 1):
        model(x)
    return model, x, patch, counts


def test_locking_while_another_thread_takes_the_last_sample_settles_once(monkeypatch) -> None:
    model, x, patch, counts = unsettled(monkeypatch)
    measuring_it, locked = threading.Event(), threading.Event()

    def slow(*given):
        measuring_it.set()
        assert locked.wait(60)
        return measuring.measured_rows(*given)

    monkeypatch.setattr(capture, "measured_rows", slow)
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    assert measuring_it.wait(60)
    before = patch.lock().plan()
    locked.set()
    thread.join(60)
    assert not thread.is_alive()
    assert patch.locked
    assert set(counts.values()) == {1}
    # The plan that `lock` settled on is the one in force, by the samples that it had.
    assert patch.plan() == before
    assert {one.samples for one in before.entries} == {len(SAMPLED_CALLS) - 1}


def test_many_threads_lock_and_call_at_once(monkeypatch) -> None:
    model, x, patch, counts = unsettled(monkeypatch)
    gate = threading.Barrier(6)
    finished: list[object] = []

    def once(act) -> None:
        gate.wait(60)
        finished.append(act())

    acts = [patch.lock, lambda: model(x)] * 3
    threads = [threading.Thread(target=once, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(finished) == len(acts)
    assert patch.locked
    assert set(counts.values()) == {1}


def test_a_locked_layer_is_not_opened_by_a_first_call_that_was_under_way() -> None:
    model, x = frozen()
    with sagepatch.apply(model, emulate=True) as first:
        for _ in range(SAMPLED_CALLS[-1]):
            model(x)
        kept = first.plan()
    patch = sagepatch.apply(model, emulate=True)
    patch.resume(kept)
    layer = patch.layers[0]
    look = layer.observer.__self__
    patch.lock()
    before = patch.plan()
    look.measure_anew(layer)
    look.settle(layer, replace(entry(layer.name, "emulated.sage1_b"), samples=9), "late")
    assert patch.locked
    assert patch.plan() == before
