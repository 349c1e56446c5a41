"""Your own model: any module that calls torch's SDPA in its forward is found and patched.

python examples/custom_module.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sagepatch


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Attention(64, 4) for _ in range(3)]).eval()
    x = torch.randn(2, 200, 64)
    with torch.inference_mode():
        plain = model(x)
        patch = sagepatch.apply(model, emulate=True)
        while not patch.locked:
            assert torch.equal(model(x), plain)  # exact until every layer has been measured
        print(f"relative difference {(model(x) - plain).norm() / plain.norm():.5f}")
        print(patch.report())
        patch.restore()
        assert torch.equal(model(x), plain)


if __name__ == "__main__":
    main()
