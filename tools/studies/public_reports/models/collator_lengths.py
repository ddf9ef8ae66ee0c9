"""DataCollatorWithPadding pads each batch to its own longest text; the last batch of an epoch is smaller.

https://github.com/huggingface/trl/issues/2603
"""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        h = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1).float()
        return self.head((h * mask).sum(1) / mask.sum(1))


def collate(texts, labels):
    longest = max(len(t) for t in texts)
    ids = torch.stack([F.pad(t, (0, longest - len(t))) for t in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(labels)}


def data():
    dice = torch.Generator().manual_seed(1)
    sizes = torch.randint(4, 12, (22,), generator=dice).tolist()
    return [torch.randint(1, 50, (n,), generator=dice) for n in sizes]


def batches(seed):
    texts = data()
    while True:
        for start in range(0, 22, 8):
            part = texts[start : start + 8]
            yield collate(part, [int(t.sum()) % 2 for t in part])


def example_batch():
    return next(batches(0))


def model():
    return Classifier()


def loss(output, batch):
    return F.cross_entropy(output, batch["labels"])


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=1e-3)
