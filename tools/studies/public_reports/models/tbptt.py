"""An LSTM language model that keeps its hidden state from one step to the next.

https://github.com/Lightning-AI/pytorch-lightning/issues/655
"""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.rnn = nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 40)
        self.hidden = None

    def forward(self, text):
        out, hidden = self.rnn(self.embed(text), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.head(out)


def model():
    return LM()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    corpus = torch.randint(40, (8, 2000), generator=dice)
    while True:
        for start in range(0, 2000 - 11, 10):
            part = corpus[:, start : start + 11]
            yield {"text": part[:, :-1], "target": part[:, 1:]}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return F.cross_entropy(output.reshape(-1, 40), batch["target"].reshape(-1))


def optimizer(named_params):
    return torch.optim.SGD(named_params, lr=0.5)


clip_norm = 0.25
