"""Segmentation with class weights, label smoothing and ignore_index=255: the mean is over the weights of the pixels that count.

https://github.com/pytorch/pytorch/pull/69511
"""

import torch
from torch import nn

C = 5


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.mid = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16), nn.SiLU(), nn.Upsample(scale_factor=2))
        self.up = nn.Sequential(nn.Conv2d(24, 8, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"))
        self.head = nn.Conv2d(8, C, 1)

    def forward(self, image):
        a = self.down(image)
        return {"out": self.head(self.up(torch.cat([a, self.mid(a)], 1)))}


def model():
    return UNet()


criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 1.0, 5.0]), ignore_index=255, label_smoothing=0.05)


def loss(output, batch):
    return criterion(output["out"], batch["mask"])


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.05, momentum=0.9, weight_decay=1e-4)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=0.9)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        mask = torch.randint(C, (4, 16, 16), generator=g)
        for n in range(4):
            mask[n, : int(torch.randint(0, 12, (1,), generator=g))] = 255
        yield {"image": torch.randn(4, 3, 16, 16, generator=g), "mask": mask}


def example_batch():
    return next(batches(0))
