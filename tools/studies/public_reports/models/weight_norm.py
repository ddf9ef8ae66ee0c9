"""A TCN with weight norm by hooks and by parametrisation, chomped convolutions, a spectral norm in its head.

https://github.com/locuslab/TCN
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrised


class Chomp1d(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, i, o, dilation, norm):
        super().__init__()
        pad = 2 * dilation
        self.conv1 = norm(nn.Conv1d(i, o, 3, padding=pad, dilation=dilation))
        self.conv2 = norm(nn.Conv1d(o, o, 3, padding=pad, dilation=dilation))
        self.net = nn.Sequential(self.conv1, Chomp1d(pad), nn.ReLU(), self.conv2, Chomp1d(pad), nn.ReLU())
        self.downsample = nn.Conv1d(i, o, 1) if i != o else None

    def forward(self, x):
        return F.relu(self.net(x) + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.tcn = nn.Sequential(TemporalBlock(2, 8, 1, weight_norm), TemporalBlock(8, 8, 2, parametrised))
        self.linear = spectral_norm(nn.Linear(8, 3))

    def forward(self, x):
        return self.linear(self.tcn(x)[:, :, -1])


def model():
    return TCN()


def loss(output, batch):
    return F.nll_loss(F.log_softmax(output, dim=1), batch[1])


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=2e-3)


clip_norm = 0.4


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 2, 16, generator=g), torch.randint(3, (8,), generator=g)


def example_batch():
    return next(batches(0))
