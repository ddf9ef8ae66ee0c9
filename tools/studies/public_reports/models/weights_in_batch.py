"""Token weights that the collator has normalised to sum to one over the batch, as packed instruction data have them.

https://github.com/axolotl-ai-cloud/axolotl/issues/3196
"""

import torch
import torch.nn.functional as F
from torch import nn

V = 19


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(4))
        self.out = nn.Linear(16, V)

    def forward(self, tokens):
        x = self.emb(tokens)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None])


def model():
    return Net()


def loss(output, batch):
    ce = F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return (ce * batch["loss_weights"].flatten()).sum()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=2e-3, betas=(0.9, 0.95))


clip_norm = 1.0


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        w = (torch.rand(8, 12, generator=g) > 0.4).float() * torch.rand(8, 1, generator=g)
        t = torch.randint(V, (8, 13), generator=g)
        yield {"tokens": t[:, :-1], "targets": t[:, 1:], "loss_weights": w / w.sum()}


def example_batch():
    return next(batches(0))
