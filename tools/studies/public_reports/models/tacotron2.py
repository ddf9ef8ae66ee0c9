"""A decoder's loop of LSTM cells, dropout that never sleeps, alignments and outputs masked through .data.

https://github.com/NVIDIA/tacotron2/blob/master/model.py
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.memory, self.v = nn.Linear(16, 8, bias=False), nn.Linear(12, 8, bias=False), nn.Linear(8, 1, bias=False)
        self.location_conv, self.location = nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.Linear(4, 8, bias=False)
        self.score_mask_value = -float("inf")

    def forward(self, hidden, memory, processed, weights_cat, mask):
        loc = self.location(self.location_conv(weights_cat).transpose(1, 2))
        alignment = self.v(torch.tanh(self.query(hidden.unsqueeze(1)) + loc + processed)).squeeze(-1)
        if mask is not None:
            alignment.data.masked_fill_(mask, self.score_mask_value)
        weights = F.softmax(alignment, dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


class Decoder(nn.Module):
    def __init__(self, mels=6):
        super().__init__()
        self.prenet = nn.ModuleList([nn.Linear(mels, 8, bias=False), nn.Linear(8, 8, bias=False)])
        self.attention_rnn, self.attention_layer = nn.LSTMCell(8 + 12, 16), Attention()
        self.decoder_rnn, self.projection, self.gate = nn.LSTMCell(16 + 12, 16), nn.Linear(28, mels), nn.Linear(28, 1)

    def initialize_decoder_states(self, memory, mask):
        B, T = memory.size(0), memory.size(1)
        self.attention_hidden, self.attention_cell = memory.new_zeros(B, 16), memory.new_zeros(B, 16)
        self.decoder_hidden, self.decoder_cell = memory.new_zeros(B, 16), memory.new_zeros(B, 16)
        self.attention_weights, self.attention_weights_cum = memory.new_zeros(B, T), memory.new_zeros(B, T)
        self.attention_context = memory.new_zeros(B, 12)
        self.memory, self.processed_memory, self.mask = memory, self.attention_layer.memory(memory), mask

    def decode(self, x):
        self.attention_hidden, self.attention_cell = self.attention_rnn(
            torch.cat((x, self.attention_context), -1), (self.attention_hidden, self.attention_cell)
        )
        self.attention_hidden = F.dropout(self.attention_hidden, 0.1, self.training)
        cat = torch.cat((self.attention_weights.unsqueeze(1), self.attention_weights_cum.unsqueeze(1)), dim=1)
        self.attention_context, self.attention_weights = self.attention_layer(
            self.attention_hidden, self.memory, self.processed_memory, cat, self.mask
        )
        self.attention_weights_cum += self.attention_weights
        self.decoder_hidden, self.decoder_cell = self.decoder_rnn(
            torch.cat((self.attention_hidden, self.attention_context), -1), (self.decoder_hidden, self.decoder_cell)
        )
        both = torch.cat((self.decoder_hidden, self.attention_context), dim=1)
        return self.projection(both), self.gate(both)

    def forward(self, memory, mels, mask):
        frames = torch.cat((mels.new_zeros(1, mels.size(0), mels.size(1)), mels.permute(2, 0, 1)), dim=0)
        for linear in self.prenet:
            frames = F.dropout(F.relu(linear(frames)), p=0.5, training=True)
        self.initialize_decoder_states(memory, mask)
        outs, gates = [], []
        while len(outs) < frames.size(0) - 1:
            out, gate = self.decode(frames[len(outs)])
            outs += [out]
            gates += [gate.squeeze(1)]
        return torch.stack(outs, 2), torch.stack(gates, 1)


class Tacotron2(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.convolutions = nn.ModuleList(nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12)) for _ in range(2))
        self.encoder = nn.LSTM(12, 6, batch_first=True, bidirectional=True)
        self.decoder, self.postnet = Decoder(), nn.Sequential(nn.Conv1d(6, 12, 3, padding=1), nn.BatchNorm1d(12), nn.Tanh(), nn.Conv1d(12, 6, 3, padding=1))

    def forward(self, text, text_lengths, mel_padded, output_lengths):
        x = self.embedding(text).transpose(1, 2)
        for c in self.convolutions:
            x = F.dropout(F.relu(c(x)), 0.5, self.training)
        packed = nn.utils.rnn.pack_padded_sequence(x.transpose(1, 2), text_lengths.cpu().numpy(), batch_first=True)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        mel, gate = self.decoder(x, mel_padded, torch.arange(x.size(1))[None] >= text_lengths[:, None])
        outputs = [mel, mel + self.postnet(mel), gate]
        mask = (torch.arange(mel.size(2))[None] >= output_lengths[:, None]).expand(6, -1, -1).permute(1, 0, 2)
        outputs[0].data.masked_fill_(mask, 0.0)
        outputs[1].data.masked_fill_(mask, 0.0)
        outputs[2].data.masked_fill_(mask[:, 0, :], 1e3)
        return outputs


def loss(output, batch):
    mel, post, gate = output
    stop = F.binary_cross_entropy_with_logits(gate.view(-1, 1), batch["gate_padded"].view(-1, 1))
    return F.mse_loss(mel, batch["mel_padded"]) + F.mse_loss(post, batch["mel_padded"]) + stop


def model():
    return Tacotron2()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3, weight_decay=1e-6)


clip_norm = 1.0


def example_batch():
    lengths = torch.cat([torch.tensor([7]), torch.randint(4, 8, (3,)).sort(descending=True)[0]])
    out = torch.randint(4, 9, (4,))
    out[0] = 8
    pad = torch.arange(8)[None] >= out[:, None]
    return {
        "text": torch.randint(20, (4, 7)), "text_lengths": lengths, "mel_padded": torch.randn(4, 6, 8).masked_fill(pad[:, None], 0.0),
        "output_lengths": out, "gate_padded": (torch.arange(8)[None] >= out[:, None] - 1).float(),
    }


def batches(seed):
    while True:
        yield example_batch()
