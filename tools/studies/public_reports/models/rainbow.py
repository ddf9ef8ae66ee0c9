"""Noisy linear layers whose noise buffers each step draws anew, a target network, a categorical projection, weights of replay.

https://github.com/Kaixhin/Rainbow/issues/2
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

ATOMS, ACTIONS, V = 11, 3, 5.0


class NoisyLinear(nn.Module):
    def __init__(self, n_in, n_out, std=0.1):
        super().__init__()
        self.n_in, self.n_out = n_in, n_out
        bound = 1 / math.sqrt(n_in)
        self.weight_mu = nn.Parameter(torch.empty(n_out, n_in).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((n_out, n_in), std / math.sqrt(n_in)))
        self.register_buffer("weight_epsilon", torch.empty(n_out, n_in))
        self.bias_mu = nn.Parameter(torch.empty(n_out).uniform_(-bound, bound))
        self.bias_sigma = nn.Parameter(torch.full((n_out,), std / math.sqrt(n_out)))
        self.register_buffer("bias_epsilon", torch.empty(n_out))
        self.reset_noise()

    def _scale_noise(self, size):
        x = torch.randn(size)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self):
        e_in, e_out = self._scale_noise(self.n_in), self._scale_noise(self.n_out)
        self.weight_epsilon.copy_(e_out.outer(e_in))
        self.bias_epsilon.copy_(e_out)

    def forward(self, x):
        return F.linear(x, self.weight_mu + self.weight_sigma * self.weight_epsilon, self.bias_mu + self.bias_sigma * self.bias_epsilon)


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.fc_h_v, self.fc_h_a = NoisyLinear(16, 16), NoisyLinear(16, 16)
        self.fc_z_v, self.fc_z_a = NoisyLinear(16, ATOMS), NoisyLinear(16, ACTIONS * ATOMS)

    def forward(self, x, log=False):
        x = F.relu(self.body(x))
        v = self.fc_z_v(F.relu(self.fc_h_v(x))).view(-1, 1, ATOMS)
        a = self.fc_z_a(F.relu(self.fc_h_a(x))).view(-1, ACTIONS, ATOMS)
        q = v + a - a.mean(1, keepdim=True)
        return F.log_softmax(q, dim=2) if log else F.softmax(q, dim=2)

    def reset_noise(self):
        for name, module in self.named_children():
            if "fc" in name:
                module.reset_noise()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = DQN()
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.register_buffer("support", torch.linspace(-V, V, ATOMS))

    def forward(self, states, actions, returns, next_states, nonterminals):
        self.online.reset_noise()
        rows, delta = len(states), 2 * V / (ATOMS - 1)
        log_ps_a = self.online(states, log=True)[torch.arange(rows), actions]
        with torch.no_grad():
            best = (self.support * self.online(next_states)).sum(2).argmax(1)
            self.target.reset_noise()
            pns_a = self.target(next_states)[torch.arange(rows), best]
            tz = (returns.unsqueeze(1) + nonterminals * 0.97 * self.support.unsqueeze(0)).clamp(min=-V, max=V)
            b = (tz + V) / delta
            l, u = b.floor().to(torch.int64), b.ceil().to(torch.int64)
            l[(u > 0) * (l == u)] -= 1
            u[(l < (ATOMS - 1)) * (l == u)] += 1
            m = states.new_zeros(rows, ATOMS)
            offset = torch.linspace(0, (rows - 1) * ATOMS, rows).unsqueeze(1).expand(rows, ATOMS).to(actions)
            m.view(-1).index_add_(0, (l + offset).view(-1), (pns_a * (u.float() - b)).view(-1))
            m.view(-1).index_add_(0, (u + offset).view(-1), (pns_a * (b - l.float())).view(-1))
        return -torch.sum(m * log_ps_a, 1)


def model():
    return Agent()


def loss(output, batch):
    return (batch["weights"] * output).mean()


def optimizer(named_params):
    return torch.optim.Adam([p for n, p in named_params if "target" not in n], lr=1e-3, eps=1.5e-4)


clip_norm = 10.0


def example_batch():
    return {
        "states": torch.randn(8, 6), "actions": torch.randint(ACTIONS, (8,)), "returns": torch.randn(8),
        "next_states": torch.randn(8, 6), "nonterminals": (torch.rand(8, 1) > 0.1).float(), "weights": torch.rand(8),
    }


def batches(seed):
    while True:
        yield example_batch()
