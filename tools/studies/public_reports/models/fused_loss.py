"""Head and cross entropy in one autograd.Function that computes gradients in its forward, chunk by chunk.

https://github.com/linkedin/Liger-Kernel/issues/968
"""

import torch
import torch.nn.functional as F
from torch import nn


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, ignore_index=-100, chunk=16):
        grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(weight)
        count = (target != ignore_index).sum()
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            part, y = x[start : start + chunk], target[start : start + chunk]
            logits = (part @ weight.t()).float()
            total += F.cross_entropy(logits, y, ignore_index=ignore_index, reduction="sum")
            grad = logits.softmax(-1)
            grad.scatter_add_(1, y.clamp(min=0)[:, None], torch.full((len(y), 1), -1.0))
            grad = grad * (y != ignore_index)[:, None] / count
            grad_x[start : start + chunk] = grad @ weight
            grad_w += grad.t() @ part
        ctx.save_for_backward(grad_x, grad_w)
        return total / count

    @staticmethod
    def backward(ctx, grad_output):
        grad_x, grad_w = ctx.saved_tensors
        if not torch.equal(grad_output, torch.tensor(1.0, device=grad_output.device)):
            grad_x, grad_w = grad_x * grad_output, grad_w * grad_output
        return grad_x, grad_w, None, None, None


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(16, 40, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        shift = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return FusedLinearCrossEntropy.apply(x.flatten(0, 1), self.lm_head.weight, shift.view(-1))


def model():
    return LM()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def example_batch():
    ids = torch.randint(40, (8, 12))
    prompt = torch.randint(2, 6, (8, 1))
    return {"input_ids": ids, "labels": torch.where(torch.arange(12) < prompt, -100, ids)}


def batches(seed):
    while True:
        yield example_batch()
