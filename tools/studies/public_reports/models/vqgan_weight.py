"""A loss that weighs its terms by gradients of the decoder's last layer, a count of steps that starts the critic.

https://github.com/lucidrains/gradnorm-pytorch/issues/8
"""

import torch
import torch.nn.functional as F
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.critic = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1))
        self.critic.requires_grad_(False)

    def get_last_layer(self):
        return self.decoder[-1].weight

    def calculate_adaptive_weight(self, nll_loss, g_loss):
        last = self.get_last_layer()
        nll_grads = torch.autograd.grad(nll_loss, last, retain_graph=True)[0]
        g_grads = torch.autograd.grad(g_loss, last, retain_graph=True)[0]
        return torch.clamp(torch.norm(nll_grads) / (torch.norm(g_grads) + 1e-4), 0.0, 1e4).detach() * 0.8

    def forward(self, x):
        recon = self.decoder(self.encoder(x))
        nll_loss = torch.mean(torch.abs(x - recon))
        g_loss = -torch.mean(self.critic(recon))
        return nll_loss + self.calculate_adaptive_weight(nll_loss, g_loss) * g_loss


def model():
    return AutoEncoder()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, betas=(0.5, 0.9))


def example_batch():
    return {"x": torch.randn(8, 3, 8, 8)}


def batches(seed):
    while True:
        yield example_batch()
