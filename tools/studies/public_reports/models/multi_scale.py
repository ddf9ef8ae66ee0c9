"""Images of another size every second batch, boxes in relative numbers in one table whose first column is the image.

https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/410
"""

import random

import torch
import torch.nn.functional as F
from torch import nn


class Yolo(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        conv = lambda a, b, s: nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b, momentum=0.1), nn.LeakyReLU(0.1))
        self.backbone = nn.Sequential(conv(3, 8, 2), conv(8, 16, 2), conv(16, 16, 2))
        self.route, self.head = conv(16, 16, 1), nn.Conv2d(16, 5 + classes, 1)

    def forward(self, x):
        x = self.backbone(x)
        x = F.interpolate(self.route(x), scale_factor=2, mode="nearest")
        b, _, h, w = x.shape
        return self.head(x).view(b, -1, h, w).permute(0, 2, 3, 1).contiguous()


def loss(predictions, batch):
    targets = batch["targets"]
    h, w = predictions.shape[1:3]
    b, cls = targets[:, :2].long().t()
    gxy = targets[:, 2:4] * torch.tensor([w, h])
    gi, gj = gxy.long().t()
    gi, gj = gi.clamp(0, w - 1), gj.clamp(0, h - 1)
    ps, tobj = predictions[b, gj, gi], torch.zeros_like(predictions[..., 0])
    pxy = ps[:, :2].sigmoid()
    lbox = F.mse_loss(pxy, gxy - gxy.floor()) + F.mse_loss(ps[:, 2:4].exp(), targets[:, 4:])
    tobj[b, gj, gi] = 1.0
    return 0.05 * lbox + F.binary_cross_entropy_with_logits(predictions[..., 4], tobj) + 0.5 * F.cross_entropy(ps[:, 5:], cls)


def model():
    return Yolo()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, weight_decay=5e-4)


def collate(img_size):
    imgs, targets = torch.stack([F.interpolate(torch.rand(1, 3, 40, 40), size=img_size, mode="nearest")[0] for _ in range(4)]), []
    for i in range(4):
        n = random.randint(1, 3)
        boxes = torch.cat([torch.zeros(n, 1), torch.randint(3, (n, 1)).float(), torch.rand(n, 4)], 1)
        boxes[:, 0] = i
        targets.append(boxes)
    return {"x": imgs, "targets": torch.cat(targets, 0)}


def example_batch():
    return collate(32)


def batches(seed):
    random.seed(seed)
    count = 0
    while True:
        if count % 2 == 0:
            img_size = random.choice(range(24, 41, 8))
        yield collate(img_size)
        count += 1
