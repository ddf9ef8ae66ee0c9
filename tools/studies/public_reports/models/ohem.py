"""Hard pixels: sorted over the whole batch, at least n_min of them, or all above a threshold.

https://github.com/MichaelFan01/STDC-Seg/issues/82
"""

import torch
from torch import nn

N_MIN = 4 * 8 * 8 // 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.head, self.aux = nn.Conv2d(12, 4, 1), nn.Conv2d(12, 4, 1)

    def forward(self, im):
        f = self.body(im)
        return self.head(f), self.aux(f)


class OhemCELoss(nn.Module):
    def __init__(self, thresh, n_min, ignore_lb=255):
        super().__init__()
        self.thresh = -torch.log(torch.tensor(thresh, dtype=torch.float))
        self.n_min = n_min
        self.criteria = nn.CrossEntropyLoss(ignore_index=ignore_lb, reduction="none")

    def forward(self, logits, labels):
        loss = self.criteria(logits, labels).view(-1)
        loss, _ = torch.sort(loss, descending=True)
        if loss[self.n_min] > self.thresh:
            loss = loss[loss > self.thresh]
        else:
            loss = loss[: self.n_min]
        return torch.mean(loss)


criteria_p, criteria_16 = OhemCELoss(0.7, N_MIN), OhemCELoss(0.7, N_MIN)


def model():
    return Net()


def loss(output, batch):
    out, out16 = output
    lb = torch.squeeze(batch["lb"], 1)
    return criteria_p(out, lb) + criteria_16(out16, lb)


def optimizer(named_params):
    wd, nowd = [], []
    for _, p in named_params:
        (nowd if p.dim() == 1 else wd).append(p)
    return torch.optim.SGD([{"params": wd}, {"params": nowd, "weight_decay": 0}], lr=1e-2, momentum=0.9, weight_decay=5e-4)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        lb = torch.randint(4, (4, 1, 8, 8), generator=g)
        lb[torch.rand(4, 1, 8, 8, generator=g) < 0.1] = 255
        yield {"im": torch.randn(4, 3, 8, 8, generator=g), "lb": lb}


def example_batch():
    return next(batches(0))
