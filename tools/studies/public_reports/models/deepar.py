"""A forecaster with Student-t likelihood: series scaled by their own mean, the loss a mean over observed values.

https://github.com/awslabs/gluonts
"""

import torch
from torch import nn
from torch.distributions import StudentT


class DeepAR(nn.Module):
    def __init__(self):
        super().__init__()
        self.cat, self.rnn = nn.Embedding(5, 3), nn.LSTM(1 + 3 + 2, 16, 2, batch_first=True)
        self.df, self.loc, self.sc = nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, past_target, past_observed, time_feat, static_cat):
        scale = (past_target.abs() * past_observed).sum(1, keepdim=True) / past_observed.sum(1, keepdim=True).clamp(min=1)
        scale = scale.clamp(min=1e-3)
        lag = torch.cat([torch.zeros_like(past_target[:, :1]), past_target[:, :-1]], 1) / scale
        cat = self.cat(static_cat)[:, None].expand(-1, lag.shape[1], -1)
        out, _ = self.rnn(torch.cat([lag[..., None], cat, time_feat], -1))
        df = 2.0 + nn.functional.softplus(self.df(out).squeeze(-1))
        return df, self.loc(out).squeeze(-1) * scale, nn.functional.softplus(self.sc(out).squeeze(-1)) * scale + 1e-4


def model():
    return DeepAR()


def weighted_average(x, weights):
    weighted = torch.where(weights != 0, x * weights, torch.zeros_like(x))
    return weighted.sum() / torch.clamp(weights.sum(), min=1.0)


def loss(output, batch):
    df, loc, scale = output
    nll = -StudentT(df, loc, scale, validate_args=False).log_prob(batch["past_target"])
    return weighted_average(nll, batch["past_observed"])


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, weight_decay=1e-8)


clip_norm = 10.0


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = (torch.randn(8, 14, generator=g).cumsum(1) + 5) * torch.rand(8, 1, generator=g).mul(30).exp().clamp(max=50)
        first = torch.randint(0, 12, (8, 1), generator=g)
        yield {
            "past_target": x, "past_observed": (torch.arange(14)[None] >= first).float(),
            "time_feat": torch.randn(8, 14, 2, generator=g), "static_cat": torch.randint(5, (8,), generator=g),
        }


def example_batch():
    return next(batches(0))
