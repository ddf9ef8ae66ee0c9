"""Quantization-aware training with fake-quant observers in each layer.

https://github.com/pytorch/pytorch/issues/35182
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver


class QLinear(nn.Linear):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.weight_fake_quant = FakeQuantize(MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        self.act_fake_quant = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.act_fake_quant(F.linear(x, self.weight_fake_quant(self.weight), self.bias))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = QLinear(10, 24), QLinear(24, 24), nn.Linear(24, 3)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def model():
    return Net()


def example_batch():
    return {"x": torch.randn(16, 10), "y": torch.randint(3, (16,))}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(named_params):
    return torch.optim.SGD(named_params, lr=0.05, momentum=0.9)
