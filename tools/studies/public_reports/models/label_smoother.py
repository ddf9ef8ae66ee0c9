"""A trainer's own label smoother: sums over labels that count, divided by their number; Adafactor.

https://github.com/huggingface/transformers/pull/35438
"""

import torch
from torch import nn

V = 23


class LabelSmoother:
    epsilon, ignore_index = 0.1, -100

    def __call__(self, logits, labels, shift_labels=False):
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        log_probs = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() == log_probs.dim() - 1:
            labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        labels = torch.clamp(labels, min=0)
        nll_loss = log_probs.gather(dim=-1, index=labels)
        smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
        nll_loss.masked_fill_(padding_mask, 0.0)
        smoothed_loss.masked_fill_(padding_mask, 0.0)
        num_active_elements = padding_mask.numel() - padding_mask.long().sum()
        nll_loss = nll_loss.sum() / num_active_elements
        smoothed_loss = smoothed_loss.sum() / (num_active_elements * log_probs.shape[-1])
        return (1 - self.epsilon) * nll_loss + self.epsilon * smoothed_loss


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, 16), nn.GRU(16, 24, 2, batch_first=True), nn.Linear(24, V)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


def model():
    return Tiny()


smoother = LabelSmoother()


def loss(output, batch):
    return smoother(output, batch["labels"], shift_labels=True)


def optimizer(named_params):
    return torch.optim.Adafactor([p for _, p in named_params], lr=1e-2)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(V, (8, 10), generator=g)
        labels = ids.clone()
        for row, n in enumerate(torch.randint(0, 8, (8,), generator=g).tolist()):
            labels[row, : n + 1] = -100
        yield {"input_ids": ids, "labels": labels, "num_tokens": int((labels != -100).sum())}


def example_batch():
    return next(batches(0))
