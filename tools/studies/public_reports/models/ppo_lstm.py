"""A recurrent policy: frames of several games in one dimension, a state that done flags reset within the loop over time.

https://github.com/vwxyzjn/cleanrl/issues/506
"""

import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical

STEPS, ENVS = 6, 4


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU())
        self.lstm = nn.LSTM(16, 8)
        for name, param in self.lstm.named_parameters():
            nn.init.constant_(param, 0) if "bias" in name else nn.init.orthogonal_(param, 1.0)
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x / 255.0)
        rows = lstm_state[0].shape[1]
        hidden, done, new_hidden = hidden.reshape((-1, rows, 16)), done.reshape((-1, rows)), []
        for h, d in zip(hidden, done):
            h, lstm_state = self.lstm(h.unsqueeze(0), ((1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]))
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1)

    def forward(self, obs, h0, c0, dones, actions):
        hidden = self.get_states(obs, (h0, c0), dones)
        probs = Categorical(logits=self.actor(hidden))
        return probs.log_prob(actions), probs.entropy(), self.critic(hidden)


def loss(output, batch):
    newlogprob, entropy, newvalue = output
    ratio = (newlogprob - batch["logprobs"]).exp()
    adv = batch["advantages"]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.9, 1.1)).mean()
    v = newvalue.view(-1)
    v_clipped = batch["values"] + torch.clamp(v - batch["values"], -0.1, 0.1)
    v_loss = 0.5 * torch.max((v - batch["returns"]) ** 2, (v_clipped - batch["returns"]) ** 2).mean()
    return pg_loss - 0.01 * entropy.mean() + v_loss * 0.5


def model():
    return Agent()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=2.5e-3, eps=1e-5)


def lr_scale(step):
    return 1.0 - step / 20


clip_norm = 0.5


def example_batch():
    n = STEPS * ENVS
    flat = np.arange(n).reshape(STEPS, ENVS).ravel()
    obs, acts = torch.randint(256, (n, 1, 8, 8)).float(), torch.randint(3, (n,))
    return {
        "obs": obs[flat], "h0": torch.randn(1, ENVS, 8), "c0": torch.randn(1, ENVS, 8), "dones": (torch.rand(n) < 0.1).float()[flat],
        "actions": acts[flat], "logprobs": -1 - torch.rand(n), "advantages": torch.randn(n), "returns": torch.randn(n), "values": torch.randn(n),
    }


def batches(seed):
    while True:
        yield example_batch()
