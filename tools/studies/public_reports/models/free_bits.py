"""Free bits: the KL of each latent, a mean over the batch, counts only above a floor.

https://github.com/rtqichen/beta-tcvae
"""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.GRU(10, 16, batch_first=True)
        self.stats, self.dec = nn.Linear(16, 8), nn.Linear(4, 60)
        nn.init.normal_(self.stats.weight, std=0.3)

    def forward(self, x, noise):
        mu, logvar = self.stats(self.enc(x)[1][0]).chunk(2, 1)
        return self.dec(mu + noise * (logvar / 2).exp()).view(x.shape), mu, logvar


def model():
    return VAE()


def loss(output, batch):
    out, mu, logvar = output
    kl = (-0.5 * (1 + logvar - mu.pow(2) - logvar.exp())).mean(dim=0)
    return F.mse_loss(out, batch["x"]) + torch.clamp(kl, min=0.25).sum()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=3e-2)


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 6, 10, generator=g) * 2, "noise": torch.randn(8, 4, generator=g)}


def example_batch():
    return next(batches(0))
