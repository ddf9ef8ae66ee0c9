"""Masked autoencoder: patches shuffled by argsort of noise, gathered back, a mean over the removed patches.

https://github.com/facebookresearch/mae/blob/main/models_mae.py
"""

import torch
from torch import nn


class MAE(nn.Module):
    def __init__(self, dim=16, dec=12):
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, dim, 4, 4), nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim), requires_grad=False)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.norm, self.decoder_embed = nn.LayerNorm(dim), nn.Linear(dim, dec)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dec))
        self.decoder_pos_embed = nn.Parameter(torch.randn(1, 17, dec), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(nn.TransformerEncoderLayer(dec, 2, 24, 0.0, batch_first=True, norm_first=True) for _ in range(1))
        self.decoder_pred = nn.Linear(dec, 48)

    def random_masking(self, x, mask_ratio):
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        ids_shuffle = torch.argsort(torch.rand(N, L, device=x.device), dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, dim=1, index=ids_shuffle[:, :len_keep].unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, imgs, mask_ratio=0.75):
        x = self.patch_embed(imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        cls = (self.cls_token + self.pos_embed[:, :1, :]).expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        x = self.decoder_embed(self.norm(x))
        tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.gather(torch.cat([x[:, 1:, :], tokens], dim=1), dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        for blk in self.decoder_blocks:
            x = blk(x)
        pred = self.decoder_pred(x)[:, 1:, :]
        target = torch.einsum("nchpwq->nhwpqc", imgs.reshape(len(imgs), 3, 4, 4, 4, 4)).reshape(len(imgs), 16, 48)
        target = (target - target.mean(dim=-1, keepdim=True)) / (target.var(dim=-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


def model():
    return MAE()


def optimizer(named_params):
    named = list(named_params)
    return torch.optim.AdamW(
        [{"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.05}, {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95),
    )


def example_batch():
    return {"imgs": torch.randn(8, 3, 16, 16)}


def batches(seed):
    while True:
        yield example_batch()
