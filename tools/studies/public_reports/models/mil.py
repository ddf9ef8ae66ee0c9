"""A slide is a bag of patches without a batch dimension: attention over dimension 0, and the hardest patches as pseudo-labels.

https://github.com/mahmoodlab/CLAM/issues/9
"""

import torch
import torch.nn.functional as F
from torch import nn


class CLAM(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(20, 16), nn.ReLU())
        self.a, self.b, self.c = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Sequential(nn.Linear(16, 8), nn.Sigmoid()), nn.Linear(8, 1)
        self.classifier, self.instance = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, features):
        h = self.fc(features)
        scores = torch.transpose(self.c(self.a(h) * self.b(h)), 1, 0)
        attention = F.softmax(scores, dim=1)
        logits = self.classifier(torch.mm(attention, h))
        top = torch.index_select(h, 0, torch.topk(attention, 4)[1][-1])
        low = torch.index_select(h, 0, torch.topk(-attention, 4, dim=1)[1][-1])
        inst = self.instance(torch.cat([top, low], dim=0))
        return logits, F.cross_entropy(inst, torch.cat([torch.ones(4), torch.zeros(4)]).long())


def model():
    return CLAM()


def loss(output, batch):
    logits, instance_loss = output
    return 0.7 * F.cross_entropy(logits, batch[1]) + 0.3 * instance_loss


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=2e-3, weight_decay=1e-5)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        n = int(torch.randint(16, 24, (1,), generator=g))
        yield torch.randn(n, 20, generator=g), torch.randint(2, (1,), generator=g)


def example_batch():
    return torch.randn(24, 20), torch.ones(1, dtype=torch.long)
