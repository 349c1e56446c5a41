"""What one rank does in the tests of context parallelism, and what it tells of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import ContextParallelConfig, QwenImageTransformer2DModel

# Loaded here, and so before the ranks fork, not in each of them.
from diffusers import FluxTransformer2DModel as FluxTransformer2DModel
from diffusers import LTXVideoTransformer3DModel as LTXVideoTransformer3DModel
from diffusers import WanTransformer3DModel as WanTransformer3DModel
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from models.diffusers_models import Inputs, _noise, tiny_flux, tiny_wan
from torch import Tensor, nn
from torch._dynamo.trace_rules import manual_torch_name_rule_map

import sagepatch
from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers.diffusers_dispatch import make_dispatch
from sagepatch.patchers.sdpa_redirect import SdpaRedirect

Options = dict[str, Any]


@dataclass(frozen=True)
class ModelCase:
    """A model spread by `degrees` and patched with `variant`, in either order."""

    model: str
    degrees: Options
    variant: str
    patch_first: bool = True

    def __str__(self) -> str:
        order = "patched first" if self.patch_first else "spread first"
        return f"{self.model} {self.degrees} {self.variant} {order}"


@dataclass(frozen=True)
class ModelTold:
    """The model's output on one rank, what its layers ran, and the output after a restore, or the
    error that diffusers itself raised there.
    """

    out: Tensor | str
    ran: Counter[str]
    calls: list[int]
    fallbacks: Counter[str]
    replaced: list[str]
    restored: Tensor | str
    names_left: int


@dataclass(frozen=True)
class CallCase:
    """One call of the dispatcher by a layer that runs `variant`; each rank gets its share of the
    tokens of q, k, v and of the last axis of `attn_mask`.
    """

    degrees: Options
    variant: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: Options = field(default_factory=dict)
    strict: bool = False
    grad: bool = False
    redirected: bool = False  # by function mode, as a processor without a backend attribute


@dataclass(frozen=True)
class CallTold:
    """This rank's rows of the output or the error raised; what the layer ran; q's gradient."""

    out: Tensor | str
    ran: Counter[str]
    fallbacks: Counter[str]
    grad: Tensor | None = None


def qwen_image() -> tuple[nn.Module, Inputs]:
    """Two prompts of unequal length, the shorter padded and masked; all sizes even."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    ).eval()
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 4:] = 0
    return model, {
        "hidden_states": _noise(2, 16, 16),
        "encoder_hidden_states": _noise(2, 10, 32, seed=2),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
    }


def ltx_video() -> tuple[nn.Module, Inputs]:
    """Two prompts of unequal length: a mask of cross-attention, repeated for each head."""
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=32,
    ).eval()
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 4:] = 0
    return model, {
        "hidden_states": _noise(2, 32, 4),
        "encoder_hidden_states": _noise(2, 10, 32, seed=2),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([500, 500]),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


MODELS = {"flux": tiny_flux, "wan": tiny_wan, "qwen": qwen_image, "ltx": ltx_video}


def each(rank: int, work: Callable[..., Any], cases: list[Any], device: str = "cpu") -> list[Any]:
    """Several cases one after the other: starting a rank costs more than they do."""
    return [work(rank, case, device) for case in cases]


def one_model(rank: int, case: ModelCase, device: str) -> ModelTold:
    """Patch a model, spread it, run it, take the patch back, run it again."""
    model, inputs = on_device(case.model, device)
    config = ContextParallelConfig(**case.degrees)
    known = len(AttentionBackendName._value2member_map_)
    if not case.patch_first:
        model.enable_parallelism(config=config)
    patch = sagepatch.apply(model, variant=case.variant, emulate=True)
    if case.patch_first:
        model.enable_parallelism(config=config)
    out = tried(lambda: run(model, inputs))
    rows = patch.report().layers
    told = [layer.record for layer in patch.layers]
    patch.restore()
    return ModelTold(
        out,
        sum((record.by_variant for record in told), Counter()),
        [record.calls for record in told],
        sum((record.fallbacks for record in told), Counter()),
        [row.replaced_by for row in rows if row.replaced_by is not None],
        tried(lambda: run(model, inputs)),
        len(AttentionBackendName._value2member_map_) - known,
    )


def one_call(rank: int, case: CallCase, device: str) -> CallTold:
    """This rank's share of one call."""
    shared = ContextParallelConfig(**case.degrees)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        device, shared.mesh_shape, mesh_dim_names=shared.mesh_dim_names
    )
    world = torch.distributed.get_world_size()
    config = ParallelConfig(context_parallel_config=shared)
    config.setup(rank, world, torch.device(device), mesh=mesh)

    def share(tensor: Tensor, dim: int) -> Tensor:
        return tensor.tensor_split(world, dim)[rank].to(device)

    q, k, v = (share(tensor, 1) for tensor in (case.q, case.k, case.v))
    options = dict(case.options)
    if "attn_mask" in options:
        options["attn_mask"] = share(options["attn_mask"], -1)
    policy = Policy(strict=case.strict, emulate=True)
    layer = PatchedLayer("site", "self", policy, Request(case.variant, True), unusable)
    q.requires_grad_(case.grad)
    dispatch = make_dispatch(dispatch_attention_fn, None)

    def attend() -> Tensor:
        out: Tensor
        if case.redirected:
            with SdpaRedirect(layer.handle):
                out = dispatch_attention_fn(q, k, v, **options, parallel_config=config)
        else:
            out = dispatch(q, k, v, **options, backend=layer.handle, parallel_config=config)
        return out

    out = tried(attend)
    record = layer.record
    if case.grad and isinstance(out, Tensor):
        out.sum().backward()
        out = out.detach()
    return CallTold(out, record.by_variant, record.fallbacks, q.grad)


def self_calibrating(rank: int, case: ModelCase, device: str) -> ModelTold:
    """A model whose layers choose by themselves: the last output and, as `restored`, the first."""
    model, inputs = on_device(case.model, device)
    patch = sagepatch.apply(model, emulate=True, threshold=0.99)
    model.enable_parallelism(config=ContextParallelConfig(**case.degrees))
    exact = run(model, inputs)
    for _ in range(7):
        run(model, inputs)
    assert patch.locked
    for layer in patch.layers:
        layer.record.by_variant.clear()
    out = run(model, inputs).cpu()
    ran = sum((layer.record.by_variant for layer in patch.layers), Counter())
    return ModelTold(out, ran, [], Counter(), [], exact.cpu(), 0)


def compiled(rank: int, case: ModelCase, device: str) -> ModelTold:
    """A model compiled whole after the patch and the spreading: its output and, as `restored`, that
    in eager mode. A graph break raises, but for the one in the gather of the output that Dynamo of
    torch 2.11 makes by itself.
    """
    model, inputs = on_device(case.model, device)
    patch = sagepatch.apply(model, variant=case.variant, emulate=True)
    model.enable_parallelism(config=ContextParallelConfig(**case.degrees))
    eager = run(model, inputs)
    traced = "torch._utils._maybe_view_chunk_cat" in manual_torch_name_rule_map
    out = run(torch.compile(model, backend="eager", fullgraph=traced), inputs)
    told = [layer.record for layer in patch.layers]
    calls = [record.calls for record in told]
    ran = sum((record.by_variant for record in told), Counter())
    return ModelTold(out.cpu(), ran, calls, Counter(), [], eager.cpu(), 0)


def on_device(name: str, device: str) -> tuple[nn.Module, Inputs]:
    """A model and its inputs, moved."""
    model, inputs = MODELS[name]()
    moved = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in inputs.items()}
    return model.to(device), moved


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The output of one forward."""
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


def tried(call: Callable[[], Tensor]) -> Tensor | str:
    """What a call returns, or the text of the error that it raises."""
    try:
        return call().cpu()
    except (ValueError, RuntimeError, sagepatch.errors.StrictFallback) as error:
        return f"{type(error).__name__}: {error}"
