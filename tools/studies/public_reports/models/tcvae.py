"""A beta-TCVAE: the total correlation relates all rows of a batch, and its weight grows from zero over the first steps.

https://github.com/rtqichen/beta-tcvae
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x, noise):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + noise * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar, z


def model():
    return VAE()


def log_density(x, mu, logvar):
    return -0.5 * (math.log(2 * math.pi) + logvar) - 0.5 * (x - mu) ** 2 * torch.exp(-logvar)


def loss(output, batch):
    recons, mu, logvar, z = output
    recons_loss = F.mse_loss(recons, batch["x"], reduction="sum") / len(z)
    log_q_zx = log_density(z, mu, logvar).sum(1)
    log_p_z = log_density(z, torch.zeros_like(z), torch.zeros_like(z)).sum(1)
    mat = log_density(z.view(-1, 1, 4), mu.view(1, -1, 4), logvar.view(1, -1, 4))
    log_q_z = torch.logsumexp(mat.sum(2), dim=1)
    log_prod_q_z = torch.logsumexp(mat, dim=1).sum(1)
    mi, tc, kld = (log_q_zx - log_q_z).mean(), (log_q_z - log_prod_q_z).mean(), (log_prod_q_z - log_p_z).mean()
    return recons_loss + mi * 0 + batch["anneal"] * (6.0 * tc + kld)


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=5e-3)


def batches(seed):
    g, step = torch.Generator().manual_seed(seed), 0
    while True:
        yield {"x": torch.randn(8, 20, generator=g), "noise": torch.randn(8, 4, generator=g), "anneal": max(0.0, (step - 1) / 10)}
        step += 1


def example_batch():
    return next(batches(0))
