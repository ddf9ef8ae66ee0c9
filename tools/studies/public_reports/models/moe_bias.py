"""An MoE router without auxiliary loss; a hook before the optimizer's step moves its bias.

https://github.com/pytorch/torchtitan/issues/1506
"""

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, dim=16, experts=4, top_k=2):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) * 0.1)
        self.top_k = top_k
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        _, chosen = torch.topk(scores + self.expert_bias, self.top_k, dim=-1)
        gates = scores.gather(-1, chosen)
        hits = F.one_hot(chosen, scores.shape[-1]).to(x.dtype)
        with torch.no_grad():
            self.tokens_per_expert.add_(hits.sum(dim=(0, 1, 2)))
        weights = (hits * gates.unsqueeze(-1)).sum(-2)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, weights)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([MoE(), MoE()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x)


the_model = None


def model():
    global the_model
    the_model = Net()
    return the_model


def optimizer(named_params):
    made = torch.optim.AdamW([p for _, p in named_params], lr=1e-2)

    def update_expert_bias(*_):
        for layer in the_model.layers:
            counts = layer.tokens_per_expert
            delta = 1e-3 * torch.sign(counts.mean() - counts)
            layer.expert_bias.add_(delta - delta.mean())
            layer.tokens_per_expert.zero_()

    made.register_step_pre_hook(update_expert_bias)
    return made


def example_batch():
    tokens = torch.randint(32, (8, 13))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
