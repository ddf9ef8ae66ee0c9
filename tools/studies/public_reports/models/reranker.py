"""A query's passages are consecutive rows; the model's own constant batch size folds scores into groups.

https://github.com/FlagOpen/FlagEmbedding/issues/230
"""

import torch
import torch.nn.functional as F
from torch import nn

TRAIN_BATCH_SIZE, GROUP = 4, 4


class CrossEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.classifier = nn.Linear(16, 1)
        self.train_batch_size = TRAIN_BATCH_SIZE
        self.register_buffer("target_label", torch.zeros(TRAIN_BATCH_SIZE, dtype=torch.long), persistent=False)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        logits = self.classifier(x[:, 0])
        scores = logits.view(self.train_batch_size, -1)
        return F.cross_entropy(scores, self.target_label)


def model():
    return CrossEncoder()


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def example_batch():
    rows = TRAIN_BATCH_SIZE * GROUP
    ends = torch.randint(4, 10, (rows, 1))
    return {"input_ids": torch.randint(40, (rows, 10)), "attention_mask": (torch.arange(10) <= ends).long()}


def batches(seed):
    while True:
        yield example_batch()
