"""GRPO, with a frozen reference model, clipped ratios and a mean over completion tokens.

https://github.com/huggingface/trl/issues/3021
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embed(ids), mask=mask, is_causal=True))


def logps(net, ids):
    logits = net(ids)[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = LM()
        self.reference = copy.deepcopy(self.policy).eval()
        for p in self.reference.parameters():
            p.requires_grad_(False)

    def forward(self, ids, completion_mask, advantages, old_logps):
        new = logps(self.policy, ids)
        with torch.no_grad():
            ref = logps(self.reference, ids)
        ratio = torch.exp(new - old_logps)
        advantages = advantages.unsqueeze(1)
        bounded = torch.clamp(ratio, 0.8, 1.2)
        gain = -torch.min(ratio * advantages, bounded * advantages)
        kl = torch.exp(ref - new) - (ref - new) - 1
        per_token = gain + 0.04 * kl
        return (per_token * completion_mask).sum() / completion_mask.sum()


def model():
    return Policy()


def example_batch():
    ids = torch.randint(32, (8, 12))
    ends = torch.randint(6, 12, (8, 1))
    mask = ((torch.arange(11) >= 4) & (torch.arange(11) < ends)).float()
    rewards = torch.rand(8).view(2, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {"ids": ids, "completion_mask": mask, "advantages": advantages.view(-1), "old_logps": -3 - torch.rand(8, 11)}


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=1e-3)


clip_norm = 1.0
