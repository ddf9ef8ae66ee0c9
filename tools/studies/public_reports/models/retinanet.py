"""Anchors by a generator with a cache, matched to a list of boxes; focal loss over foreground counts; frozen batch norm.

https://github.com/facebookresearch/detectron2/issues/703
"""

import torch
import torch.nn.functional as F
from torch import nn


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))

    def forward(self, x):
        scale = (self.weight * (self.running_var + 1e-5).rsqrt()).reshape(1, -1, 1, 1)
        return x * scale + self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale


class RetinaNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.classes, self.anchors = classes, {}
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), FrozenBatchNorm2d(8), nn.ReLU())
        self.c4 = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), FrozenBatchNorm2d(8), nn.ReLU())
        self.lateral = nn.Conv2d(8, 8, 1)
        self.tower = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.cls_score, self.bbox_pred = nn.Conv2d(8, classes, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        nn.init.constant_(self.cls_score.bias, -2.0)

    def grid(self, size, stride, device):
        key = (size, stride)
        if key not in self.anchors:
            at = (torch.arange(size, device=device) + 0.5) * stride
            y, x = torch.meshgrid(at, at, indexing="ij")
            centre = torch.stack([x, y], -1).view(-1, 2)
            self.anchors[key] = torch.cat([centre - 2 * stride, centre + 2 * stride], 1)
        return self.anchors[key]

    def forward(self, images):
        c3 = self.stem(images)
        c4 = self.c4(c3)
        p3 = c3 + F.interpolate(self.lateral(c4), scale_factor=2.0, mode="nearest")
        logits, deltas, anchors = [], [], []
        for feature, stride in ((p3, 2), (c4, 4)):
            h = self.tower(feature)
            logits.append(self.cls_score(h).permute(0, 2, 3, 1).flatten(1, 2))
            deltas.append(self.bbox_pred(h).permute(0, 2, 3, 1).flatten(1, 2))
            anchors.append(self.grid(feature.shape[-1], stride, images.device))
        return torch.cat(logits, 1), torch.cat(deltas, 1), torch.cat(anchors)


def box_iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area = lambda t: (t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])
    return inter / (area(a)[:, None] + area(b) - inter)


@torch.no_grad()
def label_anchors(anchors, targets, classes):
    labels, boxes = [], []
    for target in targets:
        vals, idx = box_iou(target["boxes"], anchors).max(0)
        label = target["labels"][idx].clone()
        label[vals < 0.3] = classes
        label[(vals >= 0.3) & (vals < 0.4)] = -1
        labels.append(label)
        boxes.append(target["boxes"][idx])
    return torch.stack(labels), torch.stack(boxes)


def loss(output, batch):
    logits, deltas, anchors = output
    classes = logits.shape[-1]
    labels, boxes = label_anchors(anchors, batch["targets"], classes)
    valid, foreground = labels >= 0, (labels >= 0) & (labels != classes)
    num_foreground = max(foreground.sum().item(), 1)
    hot = F.one_hot(labels[valid], classes + 1)[:, :-1].to(logits.dtype)
    p, ce = logits[valid].sigmoid(), F.binary_cross_entropy_with_logits(logits[valid], hot, reduction="none")
    focal = ce * (1 - (p * hot + (1 - p) * (1 - hot))) ** 2 * (0.25 * hot + 0.75 * (1 - hot))
    wanted = (boxes - anchors)[foreground] / 8
    return (focal.sum() + F.smooth_l1_loss(deltas[foreground], wanted, reduction="sum")) / num_foreground


def model():
    return RetinaNet()


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.01, momentum=0.9, weight_decay=1e-4)


def example_batch():
    targets = []
    for _ in range(4):
        n = int(torch.randint(1, 4, ()))
        corner = torch.rand(n, 2) * 8
        targets.append({"boxes": torch.cat([corner, corner + 4 + torch.rand(n, 2) * 4], 1), "labels": torch.randint(3, (n,))})
    return {"images": torch.randn(4, 3, 16, 16), "targets": targets}


def batches(seed):
    while True:
        yield example_batch()
