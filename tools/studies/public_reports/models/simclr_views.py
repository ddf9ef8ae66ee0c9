"""Two views of each image in one tensor, first all of one kind, then all of the other; the loss is a similarity matrix.

https://github.com/sthalles/SimCLR/issues/29
"""

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE, VIEWS = 0.07, 2


class ResNetSimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16),
        )

    def forward(self, images):
        return self.backbone(images)


def model():
    return ResNetSimCLR()


criterion = nn.CrossEntropyLoss()


def info_nce_loss(features):
    batch_size = len(features) // VIEWS
    labels = torch.cat([torch.arange(batch_size) for _ in range(VIEWS)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / TEMPERATURE, torch.zeros(logits.shape[0], dtype=torch.long)


def loss(output, batch):
    logits, labels = info_nce_loss(output)
    return criterion(logits, labels)


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], 3e-4, weight_decay=1e-4)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0, last_epoch=-1)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(8, 3, 8, 8, generator=g)
        yield {"images": torch.cat([x + 0.3 * torch.randn(x.shape, generator=g) for _ in range(2)], 0)}


def example_batch():
    return next(batches(0))
