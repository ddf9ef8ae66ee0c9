"""Device d0: stage 0 of 2 of Llama.

    [d0] --> d1      1f1b, 4 micro-batches of 4

Written by bigbrain-fx; needs torch, safetensors and runtime/.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:  # as in `from bundle.device_d0 import Stage0`
    from .runtime import Channel, Device, Stage
else:
    from runtime import Channel, Device, Stage


class Rotary(nn.Module):
    """Rotary, such as `rotary`, first in llama.py:63."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(8))

    def forward(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # llama.py:63
            positions = torch.arange(62, device=self.frequencies.device)
            angles = torch.outer(positions.float(), self.frequencies)  # llama.py:64
            angles = torch.cat([angles, angles], dim=-1)  # llama.py:65
            cos = torch.cos(angles)  # llama.py:66
            sin = torch.sin(angles)
        return cos, sin


class RMSNorm(nn.Module):
    """RMSNorm, such as `blocks.0.attention_norm`, first in llama.py:47."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))

    def forward(self, x: Tensor) -> Tensor:
        # llama.py:47
        return x * torch.rsqrt((x ** 2).mean(dim=-1, keepdim=True) + 1e-05) * self.weight


class Attention(nn.Module):
    """Attention, such as `blocks.0.attention`, first in llama.py:90."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64, bias=False)
        self.k = nn.Linear(64, 32, bias=False)
        self.v = nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 16)).transpose(1, 2)  # llama.py:98
        k = self.k(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        left, right = q.chunk(2, dim=-1)  # llama.py:71
        q = q * cos + torch.cat([-right, left], dim=-1) * sin  # llama.py:73
        left, right = k.chunk(2, dim=-1)  # llama.py:71
        k = k * cos + torch.cat([-right, left], dim=-1) * sin  # llama.py:73
        k = k.repeat_interleave(2, dim=1)  # llama.py:92
        v = v.repeat_interleave(2, dim=1)  # llama.py:93
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # llama.py:94
        return self.out(mixed.transpose(1, 2).flatten(2))  # llama.py:95


class FeedForward(nn.Module):
    """FeedForward, such as `blocks.0.mlp`, first in llama.py:112."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 172, bias=False)
        self.up = nn.Linear(64, 172, bias=False)
        self.down = nn.Linear(172, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # llama.py:112


class Block(nn.Module):
    """Block, such as `blocks.0`, first in llama.py:47."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm()
        self.attention = Attention()
        self.mlp_norm = RMSNorm()
        self.mlp = FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)  # llama.py:127
        return x + self.mlp(self.mlp_norm(x))  # llama.py:128


class Stage0(Stage):
    """Stage 0, for device d0: embed to blocks.1."""

    returns = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.rotary = Rotary()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # llama.py:155
        cos, sin = self.rotary()  # llama.py:156
        for block in self.blocks:  # llama.py:158
            x = block(x, cos, sin)
        return x


# Messages: tag, kind, the value's name in plan.json; from where to where; one's form.
X_TO_1 = Channel(
    0, "activation", "add_11", source=0, target=1, sender="d0", receiver="d1",
    shape=(4, 62, 64), dtype=torch.float32, requires_grad=True,
)
X_GRAD_FROM_1 = Channel(
    1, "gradient", "add_11", source=1, target=0, sender="d1", receiver="d0",
    shape=(4, 62, 64), dtype=torch.float32,
)
NORMS_TO_1 = Channel(
    2, "norm", "norms", source=0, target=1, sender="d0", receiver="d1",
    shape=(19,), dtype=torch.float32,
)
NORMS_FROM_1 = Channel(
    3, "norm", "norms", source=1, target=0, sender="d1", receiver="d0",
    shape=(20,), dtype=torch.float32,
)


class DeviceD0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1")
    micro_batches = 4
    stages: ClassVar = {0: Stage0}
    channels = (X_TO_1, X_GRAD_FROM_1, NORMS_TO_1, NORMS_FROM_1)

    def forward_0(self, m: int) -> None:
        tokens = self.batch("tokens", m)
        x = self.forward(0, m, tokens=tokens)
        self.send(X_TO_1, m, x)  # to d1

    def backward_0(self, m: int) -> None:
        x_grad = self.recv(X_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, x=x_grad)

    def update(self) -> None:
        self.send_norms(NORMS_TO_1)  # to d1
        self.recv_norms(NORMS_FROM_1)  # from d1
        self.optimizer_step()

    def step_once(self) -> None:
        for m in range(2):
            self.forward_0(m)
        for m in range(2):
            self.backward_0(m)
            self.forward_0(m + 2)
        for m in range(2, 4):
            self.backward_0(m)
        self.update()
