"""Rows are mixed at a layer that Python's random picks, by a share that NumPy draws; the loss is of both labels.

https://github.com/vikasverma1077/manifold_mixup/issues/7
"""

import random

import numpy as np
import torch
from torch import nn


def mixup_process(out, target_reweighted, lam):
    indices = np.random.permutation(out.size(0))
    out = out * lam + out[indices] * (1 - lam)
    return out, target_reweighted * lam + target_reweighted[indices] * (1 - lam)


class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(a), nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(b), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.shortcut = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False)) if stride != 1 or a != b else nn.Sequential()

    def forward(self, x):
        out = self.conv2(torch.relu(self.bn2(self.conv1(torch.relu(self.bn1(x))))))
        out += self.shortcut(x)
        return out


class PreActResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.classes, self.conv1 = classes, nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.layer1, self.layer2, self.linear = Block(8, 8, 1), Block(8, 16, 2), nn.Linear(16, classes)
        self.bce_loss, self.softmax = nn.BCELoss(), nn.Softmax(dim=1)

    def forward(self, x, target):
        layer_mix = random.randint(0, 2)
        lam = torch.from_numpy(np.array([np.random.beta(2.0, 2.0)]).astype("float32"))
        out = x
        target_reweighted = torch.zeros(len(target), self.classes).scatter_(1, target.unsqueeze(1), 1)
        if layer_mix == 0:
            out, target_reweighted = mixup_process(out, target_reweighted, lam)
        out = self.layer1(self.conv1(out))
        if layer_mix == 1:
            out, target_reweighted = mixup_process(out, target_reweighted, lam)
        out = self.layer2(out)
        if layer_mix == 2:
            out, target_reweighted = mixup_process(out, target_reweighted, lam)
        out = self.linear(out.mean((2, 3)))
        return self.bce_loss(self.softmax(out), target_reweighted)


def model():
    return PreActResNet()


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.1)


def example_batch():
    return {"x": torch.randn(8, 3, 8, 8), "target": torch.randint(4, (8,))}


def batches(seed):
    while True:
        yield example_batch()
