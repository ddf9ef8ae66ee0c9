"""A momentum encoder and a queue of keys written at int(self.queue_ptr).

https://github.com/salesforce/BLIP/issues/101
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class MoCo(nn.Module):
    def __init__(self, dim=8, size=32):
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, dim))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.size = size
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * 0.99 + q.data * 0.01

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        assert self.size % keys.shape[0] == 0
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.size

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([pos, neg], 1) / 0.07
        self._dequeue_and_enqueue(k)
        return logits


def model():
    return MoCo()


def example_batch():
    x = torch.randn(8, 12)
    return {"im_q": x + 0.1 * torch.randn(8, 12), "im_k": x + 0.1 * torch.randn(8, 12)}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long))


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.03, momentum=0.9, weight_decay=1e-4)
