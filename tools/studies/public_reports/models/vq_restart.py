"""A codebook by moving averages, started from the first batch by k-means, its dead codes replaced by rows of the batch.

https://github.com/lucidrains/vector-quantize-pytorch/issues/3
"""

import torch
import torch.nn.functional as F
from torch import nn


def kmeans(rows, count, rounds=3):
    means = rows[torch.randperm(len(rows))[:count]]
    for _ in range(rounds):
        nearest = torch.cdist(rows, means).argmin(-1)
        bins = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(means).index_add_(0, nearest, rows)
        means = torch.where((bins == 0)[:, None], means, sums / bins.clamp(min=1)[:, None])
    return means, bins.float()


class Codebook(nn.Module):
    def __init__(self, dim, count, decay=0.8, threshold=0.5):
        super().__init__()
        self.count, self.decay, self.threshold = count, decay, threshold
        self.register_buffer("initted", torch.tensor([False]))
        self.register_buffer("embed", torch.zeros(count, dim))
        self.register_buffer("cluster_size", torch.zeros(count))
        self.register_buffer("embed_avg", torch.zeros(count, dim))

    @torch.no_grad()
    def init_embed_(self, rows):
        if self.initted:
            return
        embed, size = kmeans(rows, self.count)
        self.embed.data.copy_(embed)
        self.embed_avg.data.copy_(embed * size[:, None])
        self.cluster_size.data.copy_(size)
        self.initted.data.copy_(torch.tensor([True]))

    @torch.no_grad()
    def expire_codes_(self, rows):
        dead = self.cluster_size < self.threshold
        if not torch.any(dead):
            return
        self.embed.data[dead] = rows[torch.randint(len(rows), (int(dead.sum()),))]

    def forward(self, x):
        rows = x.detach().flatten(0, 1)
        self.init_embed_(rows)
        index = torch.cdist(rows, self.embed).argmin(-1)
        hot = F.one_hot(index, self.count).type(x.dtype)
        quantized = F.embedding(index.view(x.shape[:-1]), self.embed.clone())
        if self.training:
            self.cluster_size.data.lerp_(hot.sum(0), 1 - self.decay)
            self.embed_avg.data.lerp_(hot.t() @ rows, 1 - self.decay)
            self.embed.data.copy_(self.embed_avg / (self.cluster_size + 1e-5)[:, None])
            self.expire_codes_(rows)
        loss = F.mse_loss(quantized, x)
        return x + (quantized - x).detach(), loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 1))
        self.codebook = Codebook(8, 12)
        self.decoder = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 4, 1))

    def forward(self, x):
        q, commit = self.codebook(self.encoder(x).transpose(1, 2))
        return self.decoder(q.transpose(1, 2)), commit


def model():
    return Net()


def loss(output, batch):
    recon, commit = output
    return F.l1_loss(recon, batch["x"]) + 0.25 * commit


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=3e-4)


def example_batch():
    return {"x": torch.randn(8, 4, 16)}


def batches(seed):
    while True:
        yield example_batch()
