"""Matrices by orthogonalized momentum, the rest by AdamW, in one optimizer; a GPT with tied weights.

https://github.com/NVIDIA/Megatron-LM/issues/4641
"""

import torch
import torch.nn.functional as F
from torch import nn


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.size(0) > x.size(1)
    x = x.T if flip else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, muon_params, adamw_params, lr=0.02, momentum=0.95, adamw_lr=3e-3):
        groups = [
            {"params": muon_params, "use_muon": True, "lr": lr},
            {"params": adamw_params, "use_muon": False, "lr": adamw_lr},
        ]
        super().__init__(groups, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["use_muon"]:
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    m = state["momentum_buffer"]
                    m.mul_(group["momentum"]).add_(p.grad)
                    g = p.grad.add(m, alpha=group["momentum"])
                    p.add_(newton_schulz(g), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)
                else:
                    if "step" not in state:
                        state["step"] = 0
                        state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["step"] += 1
                    m, v, t = state["m"], state["v"], state["step"]
                    m.lerp_(p.grad, 0.1)
                    v.lerp_(p.grad.square(), 0.05)
                    p.sub_(group["lr"] * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (d,))).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (d,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(40, 16)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(16, 40, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(x) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model():
    return GPT()


def optimizer(named_params):
    named = list(named_params)
    matrices = [p for n, p in named if p.ndim == 2 and "wte" not in n]
    rest = [p for n, p in named if p.ndim != 2 or "wte" in n]
    return Muon(matrices, rest)


def lr_scale(step):
    return min(1.0, (step + 1) / 4)


def example_batch():
    tokens = torch.randint(40, (8, 13))
    return {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()
