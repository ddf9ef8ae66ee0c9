"""Activation checkpoints that keep every second matrix product, by a policy, as torchtitan's selective option does.

https://github.com/pytorch/pytorch/pull/125795
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def context_fn():
    seen = defaultdict(int)

    def policy(ctx, func, *args, **kwargs):
        mode = "recompute" if ctx.is_recompute else "forward"
        if func in SAVED:
            seen[mode] += 1
        save = func in SAVED and seen[mode] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2, self.w3 = nn.Linear(dim, 32, bias=False), nn.Linear(32, dim, bias=False), nn.Linear(dim, 32, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (2, 8)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Checkpointed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, *args):
        return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, context_fn=context_fn, preserve_rng_state=False)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(40, 16)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.norm = nn.RMSNorm(16)
        self.output = nn.Linear(16, 40, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def model():
    made = Transformer()
    for name, block in list(made.layers.named_children()):
        made.layers.register_module(name, Checkpointed(block))
    return made


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def example_batch():
    tokens = torch.randint(40, (8, 13))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()
