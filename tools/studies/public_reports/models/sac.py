"""Soft actor-critic: three losses, three optimizers, critics frozen by detached weights, targets moved after each step.

https://github.com/vwxyzjn/cleanrl/pull/270
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, n_out))


class Agent(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.actor, self.qf1, self.qf2 = mlp(obs, 2 * act), mlp(obs + act, 1), mlp(obs + act, 1)
        self.qf1_target, self.qf2_target = copy.deepcopy(self.qf1), copy.deepcopy(self.qf2)
        for p in (*self.qf1_target.parameters(), *self.qf2_target.parameters()):
            p.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.target_entropy = -float(act)

    def get_action(self, x):
        mean, log_std = self.actor(x).chunk(2, -1)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - y_t.pow(2) + 1e-6)
        return y_t, log_prob.sum(1, keepdim=True)

    def forward(self, obs, action, reward, next_obs, done):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_log_pi = self.get_action(next_obs)
            both = torch.cat([next_obs, next_action], 1)
            min_next = torch.min(self.qf1_target(both), self.qf2_target(both)) - alpha * next_log_pi
            target = reward + (1 - done) * 0.99 * min_next.view(-1)
        pair = torch.cat([obs, action], 1)
        qf_loss = F.mse_loss(self.qf1(pair).view(-1), target) + F.mse_loss(self.qf2(pair).view(-1), target)
        pi, log_pi = self.get_action(obs)
        pair = torch.cat([obs, pi], 1)
        for p in (*self.qf1.parameters(), *self.qf2.parameters()):
            p.requires_grad_(False)
        min_qf = torch.min(self.qf1(pair), self.qf2(pair)).view(-1)
        for p in (*self.qf1.parameters(), *self.qf2.parameters()):
            p.requires_grad_(True)
        actor_loss = (alpha * log_pi.view(-1) - min_qf).mean()
        alpha_loss = (-self.log_alpha.exp() * (log_pi + self.target_entropy).detach()).mean()
        return qf_loss + actor_loss + alpha_loss


the_agent = None


def model():
    global the_agent
    the_agent = Agent()
    return the_agent


class Three(torch.optim.Optimizer):
    def __init__(self, named):
        pick = lambda *parts: [p for n, p in named if n.startswith(parts)]
        self.all = [
            torch.optim.Adam(pick("qf1.", "qf2."), lr=1e-3), torch.optim.Adam(pick("actor"), lr=3e-4),
            torch.optim.Adam(pick("log_alpha"), lr=1e-3),
        ]
        super().__init__([g for o in self.all for g in o.param_groups], {})
        self.param_groups = [g for o in self.all for g in o.param_groups]

    def step(self, closure=None):
        for o in self.all:
            o.step()
        with torch.no_grad():
            for net, target in ((the_agent.qf1, the_agent.qf1_target), (the_agent.qf2, the_agent.qf2_target)):
                for p, t in zip(net.parameters(), target.parameters()):
                    t.data.copy_(0.005 * p.data + 0.995 * t.data)


def optimizer(named_params):
    return Three(list(named_params))


def example_batch():
    return {
        "obs": torch.randn(8, 6), "action": torch.rand(8, 2) * 2 - 1, "reward": torch.randn(8), "next_obs": torch.randn(8, 6),
        "done": (torch.rand(8) < 0.1).float(),
    }


def batches(seed):
    while True:
        yield example_batch()
