"""Labelled rows beside three times as many unlabelled ones, interleaved for batch norm, pseudo-labels above a threshold.

https://github.com/kekmodel/FixMatch-pytorch/issues/36
"""

import torch
import torch.nn.functional as F
from torch import nn

MU = 3


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.fc = nn.Linear(8, 4)

    def forward(self, inputs_x, inputs_u_w, inputs_u_s):
        batch_size = inputs_x.shape[0]
        inputs = interleave(torch.cat((inputs_x, inputs_u_w, inputs_u_s)), 2 * MU + 1)
        logits = de_interleave(self.fc(self.features(inputs)), 2 * MU + 1)
        logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
        return logits[:batch_size], logits_u_w, logits_u_s


def model():
    return Net()


def loss(output, batch):
    logits_x, logits_u_w, logits_u_s = output
    lx = F.cross_entropy(logits_x, batch["targets_x"], reduction="mean")
    pseudo_label = torch.softmax(logits_u_w.detach(), dim=-1)
    max_probs, targets_u = torch.max(pseudo_label, dim=-1)
    mask = max_probs.ge(0.3).float()
    return lx + (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()


def optimizer(named_params):
    named = list(named_params)
    no_decay = ["bias", "bn"]
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 5e-4},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.03, momentum=0.9, nesterov=True)


def example_batch():
    u = torch.randn(4 * MU, 3, 8, 8)
    return {
        "inputs_x": torch.randn(4, 3, 8, 8), "inputs_u_w": u, "inputs_u_s": u + 0.3 * torch.randn_like(u),
        "targets_x": torch.randint(4, (4,)),
    }


def batches(seed):
    while True:
        yield example_batch()
