"""Packed LSTM over frames of unlike length, CTC, SpecAugment drawn in forward.

https://github.com/smeetrs/deep_avsr/issues/38
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(10, 16, 3, stride=2, padding=1)
        self.rnn = nn.LSTM(16, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 9)

    def forward(self, frames, lengths):
        if self.training:
            start = int(torch.randint(0, frames.shape[1] - 3, ()))
            frames = frames.clone()
            frames[:, start : start + 3] = 0
        h = torch.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=h.shape[1])
        return self.head(out).log_softmax(-1), lengths


def model():
    return Recognizer()


def example_batch():
    return {
        "frames": torch.randn(8, 40, 10),
        "lengths": torch.randint(24, 41, (8,)),
        "labels": torch.randint(1, 9, (8, 6)),
        "label_lengths": torch.randint(2, 7, (8,)),
    }


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    logps, lengths = output
    return F.ctc_loss(logps.transpose(0, 1), batch["labels"], lengths, batch["label_lengths"], zero_infinity=True)


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=1e-2)
