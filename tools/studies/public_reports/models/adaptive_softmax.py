"""torch.nn.AdaptiveLogSoftmaxWithLoss, whose clusters take the words that a batch has, as the loss of a recurrent model.

https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/adaptive.py
"""

import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, ntoken=60, ninp=16, nhid=24):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, ninp)
        self.rnn = nn.GRU(ninp, nhid, 2, dropout=0.2)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(nhid, ntoken, cutoffs=[10, 30], div_value=2.0)

    def forward(self, input, hidden, target):
        output, _ = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.adaptive(self.drop(output).flatten(0, 1), target.flatten()).loss


batch_dims = {"input": 1, "hidden": 1, "target": 1}


def model():
    return LM()


def optimizer(named_params):
    return torch.optim.Adagrad([p for _, p in named_params], lr=0.1, lr_decay=1e-5)


clip_norm = 0.25


def example_batch():
    words = (torch.rand(9, 8) ** 3 * 60).long()
    return {"input": words[:-1], "hidden": torch.randn(2, 8, 24), "target": words[1:]}


def batches(seed):
    while True:
        yield example_batch()
