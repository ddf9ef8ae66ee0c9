"""Targets of unlike number a picture, a Hungarian matcher in the loss, losses in a dict.

https://github.com/huggingface/transformers/issues/13197
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class DETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU())
        self.query = nn.Embedding(5, 16)
        self.transformer = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        h = self.transformer(self.query.weight.expand(images.shape[0], -1, -1), memory)
        return {"pred_logits": self.classes(h), "pred_boxes": self.boxes(h).sigmoid()}


@torch.no_grad()
def match(logits, boxes, labels, target):
    cost = (torch.cdist(boxes, target, p=1) - logits.softmax(-1)[:, labels]).tolist()
    best = min(itertools.permutations(range(len(cost)), len(labels)), key=lambda q: sum(cost[i][j] for j, i in enumerate(q)))
    return torch.tensor(best, dtype=torch.long)


def loss(output, batch):
    losses = {"ce": 0.0, "l1": 0.0}
    num_boxes = sum(len(t["labels"]) for t in batch["targets"])
    for logits, boxes, target in zip(output["pred_logits"], output["pred_boxes"], batch["targets"]):
        chosen = match(logits, boxes, target["labels"], target["boxes"])
        wanted = torch.full((logits.shape[0],), 3)
        wanted[chosen] = target["labels"]
        losses["ce"] = losses["ce"] + F.cross_entropy(logits, wanted) / len(batch["targets"])
        losses["l1"] = losses["l1"] + F.l1_loss(boxes[chosen], target["boxes"], reduction="sum") / num_boxes
    return losses["ce"] + 5 * losses["l1"]


def model():
    return DETR()


def example_batch():
    def target():
        count = int(torch.randint(1, 4, ()))
        return {"labels": torch.randint(3, (count,)), "boxes": torch.rand(count, 4)}

    return {"images": torch.randn(4, 3, 16, 16), "targets": [target() for _ in range(4)]}


def batches(seed):
    while True:
        yield example_batch()


def optimizer(named_params):
    named = list(named_params)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "backbone" not in n]},
            {"params": [p for n, p in named if "backbone" in n], "lr": 1e-5},
        ],
        lr=1e-4,
        weight_decay=1e-4,
    )


clip_norm = 0.1
