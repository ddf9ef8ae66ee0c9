"""A frozen teacher with dropout and batch norm inside the model, kept in eval mode by an own train(); temperature squared."""

import torch
import torch.nn.functional as F
from torch import nn

T, ALPHA = 4.0, 0.9


def net(width):
    return nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


class Student(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Student(), net(48)
        for p in self.teacher.parameters():
            p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x, y):
        with torch.no_grad():
            t = self.teacher(x)
        s = self.student(x)
        kd = F.kl_div(F.log_softmax(s / T, dim=1), F.softmax(t / T, dim=1), reduction="batchmean") * T * T
        return {"loss": ALPHA * kd + (1 - ALPHA) * F.cross_entropy(s, y), "logits": s}


def model():
    return Distiller()


def optimizer(named_params):
    return torch.optim.SGD((p for _, p in named_params), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 12, generator=g), "y": torch.randint(5, (8,), generator=g)}


def example_batch():
    return next(batches(0))
