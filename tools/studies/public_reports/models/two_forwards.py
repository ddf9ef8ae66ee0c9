"""Chosen and rejected answers in two forward passes of one model, with gradient checkpointing.

https://github.com/xfactlab/orpo/issues/9
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class ORPO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LM()

    def logp(self, ids, mask):
        logps = self.lm(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (logps * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)

    def forward(self, chosen, chosen_mask, rejected, rejected_mask):
        good, bad = self.logp(chosen, chosen_mask), self.logp(rejected, rejected_mask)
        odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        return -good.mean() - 0.1 * F.logsigmoid(odds).mean()


def model():
    return ORPO()


def example_batch():
    def one():
        ends = torch.randint(4, 10, (8, 1))
        return torch.randint(32, (8, 10)), (torch.arange(10) <= ends).float()

    (chosen, chosen_mask), (rejected, rejected_mask) = one(), one()
    return {"chosen": chosen, "chosen_mask": chosen_mask, "rejected": rejected, "rejected_mask": rejected_mask}


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=1e-3)
