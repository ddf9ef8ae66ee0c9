"""Chosen above rejected answers in one tensor; a frozen reference model in the same module; the loss folds the halves.

https://github.com/jingyaogong/minimind/issues/451
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

V = 17


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, 16), nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.head = nn.Linear(16, V, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x):
        h = self.tok(x) + self.pos.weight[: x.shape[1]]
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.head(h)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = LM()
        self.ref = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            ref = logits_to_log_probs(self.ref(x), y)
        return logits_to_log_probs(self.policy(x), y), ref


def logits_to_log_probs(logits, labels):
    return torch.gather(F.log_softmax(logits, dim=2), 2, labels.unsqueeze(2)).squeeze(-1)


def model():
    return Pair()


def loss(output, batch):
    probs, ref = output
    mask = batch["mask"]
    lengths = mask.sum(dim=1, keepdim=True).clamp_min(1e-8)
    ref = (ref * mask).sum(dim=1) / lengths.squeeze()
    probs = (probs * mask).sum(dim=1) / lengths.squeeze()
    half = ref.shape[0] // 2
    pi = probs[:half] - probs[half:]
    return -F.logsigmoid(0.1 * (pi - (ref[:half] - ref[half:]))).mean()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        t = torch.randint(V, (8, 9), generator=g)
        yield {"x": t[:, :-1], "y": t[:, 1:], "mask": (torch.rand(8, 8, generator=g) > 0.3).float()}


def example_batch():
    return next(batches(0))
