"""A length regulator: each phoneme is repeated by its own duration, rows padded to the longest of the batch.

https://github.com/ming024/FastSpeech2/issues/55
"""

import torch
import torch.nn.functional as F
from torch import nn


class LengthRegulator(nn.Module):
    def forward(self, x, duration):
        out = [torch.repeat_interleave(row, d, dim=0) for row, d in zip(x, duration)]
        return nn.utils.rnn.pad_sequence(out, batch_first=True), torch.stack([d.sum() for d in duration])


class FFT(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.conv1, self.conv2 = nn.Conv1d(dim, 32, 3, padding=1), nn.Conv1d(32, dim, 1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, mask):
        x = self.norm1(x + self.attn(x, x, x, key_padding_mask=mask, need_weights=False)[0]).masked_fill(mask.unsqueeze(-1), 0)
        return self.norm2(x + self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)).masked_fill(mask.unsqueeze(-1), 0)


class FastSpeech2(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.encoder = nn.ModuleList(FFT() for _ in range(2))
        self.duration, self.pitch = nn.Linear(16, 1), nn.Linear(16, 1)
        self.pitch_embed = nn.Embedding(8, 16)
        self.register_buffer("pitch_bins", torch.linspace(-2, 2, 7))
        self.length_regulator = LengthRegulator()
        self.decoder = nn.ModuleList(FFT() for _ in range(2))
        self.mel = nn.Linear(16, 8)

    def forward(self, texts, durations, pitches):
        mask = texts == 0
        x = self.embed(texts)
        for layer in self.encoder:
            x = layer(x, mask)
        log_d, pitch = self.duration(x).squeeze(-1), self.pitch(x).squeeze(-1)
        x = x + self.pitch_embed(torch.bucketize(pitches, self.pitch_bins))
        x, mel_lens = self.length_regulator(x, durations)
        mel_mask = torch.arange(x.shape[1])[None, :] >= mel_lens[:, None]
        for layer in self.decoder:
            x = layer(x, mel_mask)
        return self.mel(x), log_d, pitch, mel_mask


def loss(output, batch):
    mel, log_d, pitch, mel_mask = output
    texts = batch["texts"] != 0
    mel_loss = F.l1_loss(mel.masked_select(~mel_mask.unsqueeze(-1)), batch["mels"].masked_select(~mel_mask.unsqueeze(-1)))
    duration = F.mse_loss(log_d[texts], torch.log(batch["durations"].float() + 1)[texts])
    return mel_loss + duration + F.mse_loss(pitch[texts], batch["pitches"][texts])


def model():
    return FastSpeech2()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, betas=(0.9, 0.98), eps=1e-9)


clip_norm = 1.0


def example_batch():
    lens = torch.randint(4, 7, (4,))
    lens[0] = 6
    valid = torch.arange(6)[None] < lens[:, None]
    durations = torch.randint(1, 4, (4, 6)) * valid
    return {
        "texts": torch.randint(1, 20, (4, 6)) * valid, "durations": durations, "pitches": torch.randn(4, 6),
        "mels": torch.randn(4, int(durations.sum(1).max()), 8),
    }


def batches(seed):
    while True:
        yield example_batch()
