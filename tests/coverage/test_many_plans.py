"""A server's life: several patched models with plans of their own in one process, eight threads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from models.diffusers_models import tiny_flux, tiny_sd3
from models.transformers_models import first_output, tiny_llama
from torch import Tensor

import sagepatch

ROUNDS = 6


def test_each_thread_gets_what_its_model_gives_alone() -> None:
    # case 50
    models = {name: build() for name, build in BUILDS.items()}

    def one(name: str) -> Tensor:
        return first_output(*models[name])

    plans = {}
    for name, threshold in (("flux", 0.998), ("flux, another plan", 0.99999), ("sd3", 0.999)):
        model, inputs = models[name]
        calibration = sagepatch.calibrate(
            model,
            run=lambda m=model, i=inputs: [first_output(m, i) for _ in range(2)],
            emulate=True,
        )
        plans[name] = calibration.plan(threshold)
    assert plans["flux"].entries != plans["flux, another plan"].entries
    patches = {name: sagepatch.apply(models[name][0], plan=plan) for name, plan in plans.items()}
    patches["llama"] = sagepatch.apply(models["llama"][0], variant="sage1_b", emulate=True)
    alone = {name: one(name) for name in models}
    ran = {name: by_variant(patches[name]) for name in models}

    def serve(number: int) -> bool:
        names = [list(models)[(number + step) % len(models)] for step in range(ROUNDS)]
        return all(torch.equal(one(name), alone[name]) for name in names)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(serve, range(8)))
    for name, patch in patches.items():
        # Nobody ran another's kernels; counts may miss some under threads.
        assert by_variant(patch).keys() == ran[name].keys()
        assert sum(by_variant(patch).values()) > sum(ran[name].values())
        patch.restore()


def by_variant(patch: sagepatch.Patch) -> Counter[str]:
    return sum((layer.record.by_variant for layer in patch.layers), Counter())


BUILDS = {
    "flux": tiny_flux,
    "flux, another plan": tiny_flux,
    "sd3": tiny_sd3,
    "llama": tiny_llama,
}
