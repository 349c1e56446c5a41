"""The bundled pipeline as a user meets it: it loads with no network and draws what it was taught.

Everything runs on one thread: on a busy machine two threads wait for each other far longer.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.demo.loader import FOLDER
from sagepatch.patchers import diffusers as diffusers_patcher

DATA = Path(__file__).parents[2] / "examples" / "train_demo" / "data"
APPLE = "a red apple"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The pipeline in fp32, loaded offline, with an empty cache, where any connection fails."""
    from huggingface_hub import constants

    def refuse(*_: object) -> None:
        raise AssertionError("loading the demo opened a connection")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("empty_cache")))
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        loaded = load_pipeline()
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def emoji() -> Tensor:
    """All pictures of the training that were not repainted, [1347, 3, 128, 128] in 0..1."""
    with np.load(DATA / "images.npz") as archive:
        images = torch.from_numpy(archive["images"])
    return images.permute(0, 3, 1, 2).float() / 255


def place_of_the_apple() -> int:
    """The number of the picture of APPLE in the training set."""
    entries = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))
    (index,) = [i for i, entry in enumerate(entries) if APPLE in entry["captions"]]
    return int(index)


def draw(pipeline: Any, prompt: str, steps: int, **options: Any) -> Tensor:
    """The picture [1, 3, H, W] in 0..1."""
    out = pipeline(
        prompt,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **options,
    )
    return out.images.float()


def nearest(image: Tensor, emoji: Tensor) -> int:
    """Index of the picture nearest in pixels at 64x64."""
    rows = [F.interpolate(x, (64, 64), mode="area").flatten(1) for x in (image, emoji)]
    return int(torch.cdist(*rows).argmin())


def test_the_parts_are_the_true_classes(pipeline: Any) -> None:
    names = {name: type(part).__name__ for name, part in pipeline.components.items() if part}
    assert type(pipeline).__module__.startswith("diffusers.pipelines.flux")
    assert names.pop("tokenizer").startswith("CLIPTokenizer")
    assert names.pop("tokenizer_2") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    assert names == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "transformer": "FluxTransformer2DModel",
    }


def test_every_attention_of_the_transformer_can_be_patched(pipeline: Any) -> None:
    found = diffusers_patcher.find(pipeline.transformer, "transformer")
    assert found.left == ()
    assert len(found.sites) == 11
    assert found.sites[0].name == "transformer.transformer_blocks.0.attn"


def test_a_red_apple_is_nearest_to_the_red_apple_of_all_1347(pipeline: Any, emoji: Tensor) -> None:
    assert len(emoji) == 1347
    image = draw(
        pipeline,
        APPLE,
        DEFAULTS.num_inference_steps,
        height=DEFAULTS.height,
        width=DEFAULTS.width,
        max_sequence_length=DEFAULTS.max_sequence_length,
        guidance_scale=DEFAULTS.guidance_scale,
    )
    assert nearest(image, emoji) == place_of_the_apple()


def test_a_call_of_defaults_has_512_text_tokens_and_draws_the_same_apple(
    pipeline: Any, emoji: Tensor
) -> None:
    widths: list[int] = []

    def note(_: object, args: object, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["encoder_hidden_states"].shape[1])

    hook = pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        image = draw(pipeline, APPLE, steps=2)
    finally:
        hook.remove()
    assert widths == [512] * 2
    assert image.shape == (1, 3, 128, 128)
    assert nearest(image, emoji) == place_of_the_apple()


def test_one_seed_gives_one_picture(pipeline: Any) -> None:
    first, second = (draw(pipeline, "a rocket", steps=1, max_sequence_length=32) for _ in range(2))
    assert torch.equal(first, second)


def test_a_colour_word_repaints_the_apple(pipeline: Any) -> None:
    red, blue = (
        draw(pipeline, prompt, steps=2, max_sequence_length=32)[0, :, 56:72, 56:72].mean((1, 2))
        for prompt in (APPLE, "a blue apple")
    )
    assert red.argmax() == 0
    assert blue.argmax() == 2


def test_it_loads_in_another_dtype_and_still_draws_the_apple(emoji: Tensor) -> None:
    loaded = load_pipeline(dtype=torch.bfloat16)
    loaded.set_progress_bar_config(disable=True)
    for name in ("transformer", "vae", "text_encoder"):
        assert {p.dtype for p in getattr(loaded, name).parameters()} == {torch.bfloat16}, name
    image = draw(loaded, APPLE, steps=1, max_sequence_length=32)
    assert nearest(image, emoji) == place_of_the_apple()


def test_the_pipeline_comes_from_the_package(pipeline: Any) -> None:
    assert Path(pipeline.config["_name_or_path"]).resolve() == FOLDER.resolve()
