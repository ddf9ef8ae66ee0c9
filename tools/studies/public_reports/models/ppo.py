"""PPO, advantages normalized over the minibatch, a clipped value loss, an action's log-probability from torch.distributions.

https://github.com/vwxyzjn/cleanrl/pull/12
"""

import torch
from torch import nn
from torch.distributions import Normal


def layer_init(layer, std=2**0.5, bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(6, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), 1.0))
        self.actor_mean = nn.Sequential(layer_init(nn.Linear(6, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), 0.01))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def forward(self, obs, action):
        mean = self.actor_mean(obs)
        probs = Normal(mean, torch.exp(self.actor_logstd.expand_as(mean)))
        return probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(obs)


def loss(output, batch):
    newlogprob, entropy, newvalue = output
    logratio = newlogprob - batch["logprob"]
    ratio = logratio.exp()
    adv = (batch["adv"] - batch["adv"].mean()) / (batch["adv"].std() + 1e-8)
    pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
    newvalue = newvalue.view(-1)
    clipped = batch["value"] + torch.clamp(newvalue - batch["value"], -0.2, 0.2)
    v_loss = 0.5 * torch.max((newvalue - batch["ret"]) ** 2, (clipped - batch["ret"]) ** 2).mean()
    return pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss


def model():
    return Agent()


def example_batch():
    return {
        "obs": torch.randn(16, 6), "action": torch.randn(16, 2), "logprob": -2 - torch.rand(16),
        "adv": torch.randn(16), "value": torch.randn(16), "ret": torch.randn(16),
    }


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=3e-4, eps=1e-5)


clip_norm = 0.5
