"""Latent diffusion: a frozen encoder, noise and timesteps drawn in the step, v-prediction, min-SNR weights, an EMA with a warm-up.

https://github.com/huggingface/diffusers/issues/9451
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Schedule:
    def __init__(self, steps=50):
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, steps) ** 2
        self.alphas_cumprod, self.steps = torch.cumprod(1 - betas, 0), steps

    def _pair(self, timesteps, like):
        a = self.alphas_cumprod.to(device=like.device, dtype=like.dtype)[timesteps].flatten()
        while a.ndim < like.ndim:
            a = a.unsqueeze(-1)
        return a**0.5, (1 - a) ** 0.5

    def add_noise(self, x, noise, timesteps):
        a, s = self._pair(timesteps, x)
        return a * x + s * noise

    def get_velocity(self, x, noise, timesteps):
        a, s = self._pair(timesteps, x)
        return a * noise - s * x


def timestep_embedding(t, dim=16):
    freqs = torch.exp(-9.21 * torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], -1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inp, self.down, self.mid = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.attn, self.norm = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True), nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x, t, text):
        h = self.inp(x)
        m = F.silu(self.norm(self.down(h) + self.time(timestep_embedding(t))[:, :, None, None]))
        q = m.flatten(2).transpose(1, 2)
        m = m + self.attn(q, text, text, need_weights=False)[0].transpose(1, 2).view_as(m)
        m = F.interpolate(F.silu(self.mid(m)), scale_factor=2.0, mode="nearest")
        return self.out(torch.cat([h, m], 1))


class LatentDiffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.unet, self.vae, self.text_encoder = UNet(), nn.Conv2d(3, 8, 4, 4), nn.Embedding(20, 8)
        self.vae.requires_grad_(False)
        self.text_encoder.requires_grad_(False)
        self.noise_scheduler = Schedule()

    def forward(self, pixel_values, input_ids):
        mean, logvar = self.vae(pixel_values).chunk(2, 1)
        latents = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)) * 0.18215
        noise = torch.randn_like(latents)
        noise += 0.1 * torch.randn((latents.shape[0], latents.shape[1], 1, 1), device=latents.device)
        timesteps = torch.randint(0, self.noise_scheduler.steps, (latents.shape[0],), device=latents.device).long()
        noisy = self.noise_scheduler.add_noise(latents, noise, timesteps)
        hidden = self.text_encoder(input_ids)
        drop = torch.rand(len(hidden), 1, 1) < 0.1
        pred = self.unet(noisy, timesteps, torch.where(drop, torch.zeros_like(hidden), hidden))
        target = self.noise_scheduler.get_velocity(latents, noise, timesteps)
        a = self.noise_scheduler.alphas_cumprod[timesteps]
        snr = a / (1 - a)
        weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / (snr + 1)
        loss = F.mse_loss(pred.float(), target.float(), reduction="none")
        return (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()


def model():
    return LatentDiffusion()


class WithEMA(torch.optim.AdamW):
    def __init__(self, params, **kw):
        super().__init__(params, **kw)
        self.optimization_step, self.shadow = 0, [p.clone().detach() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.optimization_step += 1
        decay = min(0.9999, (1 + self.optimization_step) / (10 + self.optimization_step))
        for s, p in zip(self.shadow, (p for g in self.param_groups for p in g["params"])):
            s.sub_((1 - decay) * (s - p))


def optimizer(named_params):
    return WithEMA([p for n, p in named_params if n.startswith("unet")], lr=1e-4, weight_decay=1e-2)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 2))


clip_norm = 1.0


def example_batch():
    return {"pixel_values": torch.randn(8, 3, 32, 32), "input_ids": torch.randint(20, (8, 6))}


def batches(seed):
    while True:
        yield example_batch()
