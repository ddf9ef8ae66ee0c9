"""Matrices' gradients are projected onto a few singular vectors, sought anew every second step; Adam works in that space.

https://github.com/huggingface/transformers/pull/29588
"""

import torch
import torch.nn.functional as F
from torch import nn


class Projector:
    def __init__(self, rank, gap, scale):
        self.rank, self.gap, self.scale, self.matrix = rank, gap, scale, None

    def project(self, grad, step):
        if self.matrix is None or step % self.gap == 0:
            u, _, vh = torch.linalg.svd(grad, full_matrices=False)
            self.matrix = vh[: self.rank] if grad.shape[0] >= grad.shape[1] else u[:, : self.rank]
        return grad @ self.matrix.t() if grad.shape[0] >= grad.shape[1] else self.matrix.t() @ grad

    def project_back(self, low, like):
        full = low @ self.matrix if like.shape[0] >= like.shape[1] else self.matrix @ low
        return full * self.scale


class GaLoreAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if "step" not in state:
                    state["step"] = 0
                if "rank" in group:
                    if "projector" not in state:
                        state["projector"] = Projector(group["rank"], group["update_proj_gap"], group["scale"])
                    grad = state["projector"].project(grad, state["step"])
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                b1, b2 = group["betas"]
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                size = group["lr"] * (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                change = state["exp_avg"] / denom
                if "rank" in group:
                    change = state["projector"].project_back(change, p)
                p.add_(change, alpha=-size)
                if group["weight_decay"] > 0:
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(3))
        self.lm_head = nn.Linear(16, 40, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.lm_head(x)


def model():
    return LM()


def loss(output, batch):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer(named_params):
    named = list(named_params)
    low = [p for n, p in named if ("self_attn" in n or "linear" in n) and p.ndim == 2]
    ids = {id(p) for p in low}
    rest = [p for n, p in named if id(p) not in ids]
    return GaLoreAdamW([{"params": rest}, {"params": low, "rank": 4, "update_proj_gap": 2, "scale": 0.25}], weight_decay=0.01)


def example_batch():
    return {"input_ids": torch.randint(40, (8, 12))}


def batches(seed):
    while True:
        yield example_batch()
