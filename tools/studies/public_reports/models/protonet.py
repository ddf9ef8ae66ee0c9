"""Episodes: support and query images of each class in one tensor, rows ordered by class; prototypes are means of rows.

https://github.com/orobix/Prototypical-Networks-for-Few-shot-Learning-PyTorch
"""

import torch
import torch.nn.functional as F
from torch import nn

WAY, SHOT, QUERY = 4, 2, 2


class Conv4(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())

    def forward(self, images):
        return self.encoder(images)


def model():
    return Conv4()


def loss(output, batch):
    target = batch["target"]
    classes = torch.unique(target)
    support = torch.stack([target.eq(c).nonzero()[:SHOT].squeeze(1) for c in classes])
    query = torch.stack([target.eq(c).nonzero()[SHOT:] for c in classes]).view(-1)
    prototypes = torch.stack([output[idx].mean(0) for idx in support])
    dists = torch.cdist(output[query], prototypes).pow(2)
    log_p = F.log_softmax(-dists, dim=1).view(len(classes), QUERY, -1)
    inds = torch.arange(len(classes)).view(-1, 1, 1).expand(len(classes), QUERY, 1)
    return -log_p.gather(2, inds).squeeze().view(-1).mean()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randperm(10, generator=g)[:WAY].repeat_interleave(SHOT + QUERY)
        yield {"images": torch.randn(len(y), 3, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.1, "target": y}


def example_batch():
    return next(batches(0))
