"""Student and teacher over crops of two sizes; a centre in the loss's buffer, a temperature by epoch, a frozen last layer.

https://github.com/facebookresearch/dino/blob/main/main_dino.py
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

OUT = 12


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
        self.last_layer = nn.utils.weight_norm(nn.Linear(8, OUT, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        self.last_layer.weight_g.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


def network():
    trunk = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(trunk, Head())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = network()
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False

    def crops(self, net, images):
        sizes = torch.tensor([i.shape[-1] for i in images])
        ends, start, out = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0), 0, []
        for end in ends:
            out.append(net[0](torch.cat(images[start:end])))
            start = end
        return net[1](torch.cat(out))

    def forward(self, images):
        return self.crops(self.student, images), self.crops(self.teacher, images[:2])


class DINOLoss(nn.Module):
    def __init__(self, ncrops=4):
        super().__init__()
        self.ncrops, self.student_temp, self.center_momentum = ncrops, 0.1, 0.9
        self.register_buffer("center", torch.zeros(1, OUT))
        self.teacher_temp_schedule = np.linspace(0.04, 0.07, 10)

    def forward(self, output, batch):
        student_output, teacher_output = output
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        temp = self.teacher_temp_schedule[int(batch["epoch"])]
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
        total, n = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v != iq:
                    total += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                    n += 1
        self.update_center(teacher_output)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


the_pair = None
loss = DINOLoss()


def model():
    global the_pair
    the_pair = Pair()
    return the_pair


def optimizer(named_params):
    named = list(named_params)
    regular, rest = [p for n, p in named if not (n.endswith(".bias") or p.ndim == 1)], [p for n, p in named if n.endswith(".bias") or p.ndim == 1]
    made = torch.optim.AdamW([{"params": regular}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    steps = {"n": 0}

    def cancel_gradients_last_layer(*_):
        if steps["n"] < 2:
            for n, p in the_pair.student.named_parameters():
                if "last_layer" in n:
                    p.grad = None

    def update_teacher(*_):
        m = 0.996 + 0.004 * steps["n"] / 10
        steps["n"] += 1
        with torch.no_grad():
            for q, k in zip(the_pair.student.parameters(), the_pair.teacher.parameters()):
                k.data.mul_(m).add_((1 - m) * q.detach().data)

    made.register_step_pre_hook(cancel_gradients_last_layer)
    made.register_step_post_hook(update_teacher)
    return made


def example_batch(epoch=0):
    return {"images": [torch.randn(6, 3, s, s) for s in (16, 16, 8, 8)], "epoch": torch.tensor(epoch)}


def batches(seed):
    step = 0
    while True:
        yield example_batch(step // 2)
        step += 1
