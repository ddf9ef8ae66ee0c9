"""Weight drop on an LSTM's recurrent matrix, locked dropout, an embedding with dropped words, a hidden state from batch to batch.

https://github.com/pytorch/pytorch/issues/32346
"""

import torch
import torch.nn.functional as F
from torch import nn


class WeightDrop(nn.Module):
    def __init__(self, module, weights, dropout):
        super().__init__()
        self.module, self.weights, self.dropout = module, weights, dropout
        self.module.flatten_parameters = lambda *a, **k: None
        for name in weights:
            raw = getattr(self.module, name)
            del self.module._parameters[name]
            self.module.register_parameter(name + "_raw", nn.Parameter(raw.data))
            setattr(self.module, name, raw.data.clone())

    def forward(self, *args):
        for name in self.weights:
            raw = getattr(self.module, name + "_raw")
            setattr(self.module, name, F.dropout(raw, p=self.dropout, training=self.training))
        return self.module(*args)


def locked_dropout(x, p):
    mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
    return mask * x


class RNNModel(nn.Module):
    def __init__(self, ntoken=30, ninp=12, nhid=16, rows=6):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnns = nn.ModuleList([WeightDrop(nn.LSTM(a, b), ["weight_hh_l0"], 0.3) for a, b in ((ninp, nhid), (nhid, ninp))])
        self.decoder = nn.Linear(ninp, ntoken)
        self.decoder.weight = self.encoder.weight
        self.hidden = [(torch.zeros(1, rows, n), torch.zeros(1, rows, n)) for n in (nhid, ninp)]

    def forward(self, input):
        w = self.encoder.weight
        keep = w.new_empty((w.size(0), 1)).bernoulli_(0.9).expand_as(w) / 0.9
        x = locked_dropout(F.embedding(input, keep * w), 0.3)
        new = []
        for rnn, h in zip(self.rnns, self.hidden):
            raw, h = rnn(x, h)
            new.append(tuple(t.detach() for t in h))
            x = locked_dropout(raw, 0.2)
        self.hidden = new
        return self.decoder(x), x, raw


def loss(output, batch):
    logits, dropped, raw = output
    ce = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["targets"].reshape(-1))
    return ce + 2 * dropped.pow(2).mean() + (raw[1:] - raw[:-1]).pow(2).mean()


def model():
    return RNNModel()


batch_dims = {"input": 1, "targets": 1}


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=1.0, weight_decay=1.2e-6)


clip_norm = 0.25


def example_batch():
    text = torch.randint(30, (8, 6))
    return {"input": text[:-1], "targets": text[1:]}


def batches(seed):
    while True:
        yield example_batch()
