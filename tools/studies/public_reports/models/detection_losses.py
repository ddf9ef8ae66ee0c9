"""The model returns a dict of losses in training, and the loop adds them up.

https://github.com/pytorch/vision/issues/1350
"""

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images, labels, boxes):
        h = self.backbone(images)
        logits, deltas = self.cls(h).flatten(2), self.reg(h).mean((2, 3))
        return {
            "loss_classifier": F.cross_entropy(logits.mean(2), labels),
            "loss_box_reg": F.smooth_l1_loss(deltas, boxes),
        }


def model():
    return Detector()


def loss(output, batch):
    return sum(output.values())


def example_batch():
    return {"images": torch.randn(8, 3, 16, 16), "labels": torch.randint(2, (8,)), "boxes": torch.rand(8, 4)}


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.02, momentum=0.9, weight_decay=1e-4)


def scheduler(made):
    return torch.optim.lr_scheduler.MultiStepLR(made, [2, 3], 0.1)
