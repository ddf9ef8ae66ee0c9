"""A trainer's loss: sum of token losses over num_items_in_batch, a number that the collator counts over the whole step.

https://github.com/huggingface/transformers/pull/35438
"""

import torch
import torch.nn.functional as F
from torch import nn

V = 23


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(16, V, bias=False)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.lm_head(x)


def model():
    return Tiny()


def loss(output, batch):
    logits, labels = output[:, :-1].float(), batch["labels"][:, 1:]
    total = F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return total / batch["num_items_in_batch"]


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=3e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(V, (8, 10), generator=g)
        labels = ids.clone()
        for row, n in enumerate(torch.randint(0, 8, (8,), generator=g).tolist()):
            labels[row, : n + 1] = -100
        yield {"input_ids": ids, "labels": labels, "num_items_in_batch": (labels[:, 1:] != -100).sum()}


def example_batch():
    return next(batches(0))
