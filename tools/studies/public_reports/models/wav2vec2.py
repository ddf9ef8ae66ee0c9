"""Spans masked by NumPy in forward, a Gumbel quantizer with a temperature that the training loop sets, sampled negatives.

https://github.com/huggingface/transformers/pull/13877
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def compute_mask_indices(shape, prob=0.4, length=3):
    rows, frames = shape
    mask = np.zeros(shape, dtype=bool)
    spans = max(1, int(prob * frames / length))
    for row in range(rows):
        starts = np.random.choice(frames - length + 1, spans, replace=False)
        mask[row, (starts[:, None] + np.arange(length)).ravel()] = True
    return torch.from_numpy(mask)


class GumbelQuantizer(nn.Module):
    def __init__(self, dim=16, groups=2, num_vars=6):
        super().__init__()
        self.groups, self.num_vars, self.temperature = groups, num_vars, 2.0
        self.vars = nn.Parameter(torch.rand(1, groups * num_vars, dim // groups))
        self.weight_proj = nn.Linear(dim, groups * num_vars)

    def forward(self, x):
        b, t, _ = x.shape
        x = self.weight_proj(x).view(b * t * self.groups, -1)
        probs = F.gumbel_softmax(x.float(), tau=self.temperature, hard=True).type_as(x)
        soft = torch.softmax(x.view(b * t, self.groups, -1).float(), -1).mean(0)
        perplexity = torch.exp(-torch.sum(soft * torch.log(soft + 1e-7), dim=-1)).sum()
        v = probs.view(b * t, -1).unsqueeze(-1) * self.vars
        return v.view(b * t, self.groups, self.num_vars, -1).sum(-2).view(b, t, -1), perplexity


class Wav2Vec2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 4, 4), nn.GELU(), nn.Conv1d(16, 16, 3, 2, 1), nn.GELU())
        self.masked_spec_embed = nn.Parameter(torch.Tensor(16).uniform_())
        self.pos_conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3, padding=1, groups=4), dim=2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.quantizer = GumbelQuantizer()
        self.project_hid, self.project_q = nn.Linear(16, 8), nn.Linear(16, 8)
        self.steps = 0

    def forward(self, wave):
        features = self.conv(wave.unsqueeze(1)).transpose(1, 2)
        b, t, _ = features.shape
        mask = compute_mask_indices((b, t))
        hidden = features.clone()
        hidden[mask] = self.masked_spec_embed
        hidden = hidden + F.gelu(self.pos_conv(hidden.transpose(1, 2))).transpose(1, 2)
        for layer in self.layers:
            if self.training and np.random.uniform() < 0.2:
                continue
            hidden = layer(hidden)
        self.quantizer.temperature = max(2.0 * 0.999**self.steps, 0.5)
        self.steps += 1
        q, perplexity = self.quantizer(features)
        q, c = self.project_q(q), self.project_hid(hidden)
        negatives = torch.randint(t - 1, (b, t, 5))
        negatives = negatives + (negatives >= torch.arange(t)[None, :, None])
        neg = q[torch.arange(b)[:, None, None], negatives]
        logits = torch.cosine_similarity(c.unsqueeze(2), torch.cat([q.unsqueeze(2), neg], 2), dim=-1) / 0.1
        target = torch.where(mask, 0, -100).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / mask.sum()
        return loss + 0.1 * (12 - perplexity) / 12


def model():
    return Wav2Vec2()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=5e-4, betas=(0.9, 0.98), eps=1e-6)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 3))


def example_batch():
    return {"wave": torch.randn(4, 96)}


def batches(seed):
    while True:
        yield example_batch()
