"""A U-Net with heads at three scales, batch dice and cross entropy with an ignored label, targets as a list.

https://github.com/MIC-DKFZ/nnUNet/issues/329
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES, IGNORE = 3, 3


def conv(a, b, s=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, widths=(8, 12, 16)):
        super().__init__()
        self.stages = nn.ModuleList(conv(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(zip((1, *widths), widths)))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.decoders = nn.ModuleList(conv(2 * a, a) for a in widths[-2::-1])
        self.seg_layers = nn.ModuleList(nn.Conv2d(a, CLASSES, 1) for a in (widths[-1], *widths[-2::-1]))

    def forward(self, x):
        skips, outputs = [], []
        for stage in self.stages:
            skips.append(x := stage(x))
        outputs.append(self.seg_layers[0](x))
        for up, decoder, head, skip in zip(self.ups, self.decoders, self.seg_layers[1:], skips[-2::-1]):
            x = decoder(torch.cat((up(x), skip), 1))
            outputs.append(head(x))
        return outputs[::-1]


def dc_and_ce(logits, target):
    mask = target != IGNORE
    clean = torch.where(mask, target, 0)
    num_fg = mask.sum()
    y = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, clean, 1)[:, 1:]
    x = torch.softmax(logits, 1)[:, 1:]
    axes = (0, 2, 3)
    inter, pred, gt = (x * y * mask).sum(axes), (x * mask).sum(axes), (y * mask).sum(axes)
    dc = (2 * inter + 1e-5) / torch.clip(gt + pred + 1e-5, 1e-8)
    ce = F.cross_entropy(logits, target[:, 0].long(), ignore_index=IGNORE) if num_fg > 0 else 0
    return ce - dc.mean()


weights = np.array([1 / (2**i) for i in range(3)])
weights[-1] = 0
weights = weights / weights.sum()


def loss(output, batch):
    return sum(w * dc_and_ce(o, t) for w, o, t in zip(weights, output, batch["target"]) if w != 0)


def model():
    return UNet()


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=100, power=0.9)


clip_norm = 12


def example_batch():
    full = torch.randint(CLASSES, (4, 1, 16, 16))
    full[torch.rand(full.shape) < 0.1] = IGNORE
    return {"x": torch.randn(4, 1, 16, 16), "target": [full, full[:, :, ::2, ::2], full[:, :, ::4, ::4]]}


def batches(seed):
    while True:
        yield example_batch()
