"""An anchor-free detector: targets per location made by the dataset, normalised by positives and by the sum of centerness.

https://github.com/open-mmlab/mmdetection/issues/5988
"""

import torch
import torch.nn.functional as F
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.cls, self.reg, self.ctr = nn.Conv2d(16, 3, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.constant_(self.cls.bias, -2.0)

    def forward(self, images):
        f = self.stem(images)
        return self.cls(f), F.relu(self.reg(f) * self.scale) + 0.05, self.ctr(f)


def model():
    return Head()


def focal(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    pt = p * targets + (1 - p) * (1 - targets)
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * ce * (1 - pt) ** gamma).sum()


def iou_loss(pred, target, weight):
    area = lambda b: (b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3])  # noqa: E731
    w = torch.min(pred[:, 0], target[:, 0]) + torch.min(pred[:, 2], target[:, 2])
    h = torch.min(pred[:, 1], target[:, 1]) + torch.min(pred[:, 3], target[:, 3])
    inter = w * h
    ious = (inter + 1.0) / (area(pred) + area(target) - inter + 1.0)
    return (-ious.log() * weight).sum()


def loss(output, batch):
    cls, reg, ctr = (o.flatten(2).transpose(1, 2).flatten(0, 1) for o in output)
    labels, boxes = batch["labels"].flatten(), batch["ltrb"].flatten(0, 1)
    pos = labels > 0
    num_pos = pos.sum().clamp(min=1)
    target = F.one_hot(labels.clamp(min=0), 4)[:, 1:].float()
    l_cls = focal(cls, target) / num_pos
    lr, tb = boxes[:, [0, 2]], boxes[:, [1, 3]]
    center = torch.sqrt(lr.min(1)[0] / lr.max(1)[0] * tb.min(1)[0] / tb.max(1)[0]) * pos
    l_reg = iou_loss(reg, boxes, center) / center.sum().clamp(min=1e-6)
    l_ctr = F.binary_cross_entropy_with_logits(ctr.squeeze(1)[pos], center[pos], reduction="sum") / num_pos
    return l_cls + l_reg + l_ctr


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.01, momentum=0.9)


def lr_scale(step):
    return min(1.0, 0.1 + step * 0.3)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(1, 4, (4, 16), generator=g) * (torch.rand(4, 16, generator=g) < torch.tensor([[0.1], [0.3], [0.6], [0.2]])).long()
        yield {"images": torch.randn(4, 3, 16, 16, generator=g), "labels": labels, "ltrb": torch.rand(4, 16, 4, generator=g) * 4 + 0.2}


def example_batch():
    return next(batches(0))
