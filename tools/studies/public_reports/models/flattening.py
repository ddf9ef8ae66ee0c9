"""Documents without padding in one row: position_ids begin anew, and a mask between documents is made of them.

https://github.com/huggingface/transformers/pull/31629
"""

import torch
import torch.nn.functional as F
from torch import nn

V, D = 19, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o, self.mlp = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (p.view(b, t, 2, D // 2).transpose(1, 2) for p in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.blocks, self.head = nn.Embedding(V, D), nn.Embedding(32, D), nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, V)

    def forward(self, input_ids, position_ids):
        doc = (position_ids == 0).cumsum(1)
        same = doc[:, :, None] == doc[:, None, :]
        mask = (same & torch.ones(same.shape[-2:], dtype=torch.bool).tril())[:, None]
        x = self.tok(input_ids) + self.pos(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def model():
    return LM()


def loss(output, batch):
    return F.cross_entropy(output[:, :-1].reshape(-1, V), batch["labels"][:, 1:].reshape(-1), ignore_index=-100)


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=2e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        a, b = sorted((torch.randperm(26, generator=g)[:2] + 3).tolist())
        lengths = [a, b - a, 32 - b]
        ids = torch.randint(V, (1, 32), generator=g)
        labels = ids.clone()
        labels[0, [0, a, b]] = -100
        yield {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


def example_batch():
    return next(batches(0))
