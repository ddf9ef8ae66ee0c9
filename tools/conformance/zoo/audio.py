"""Models of sound."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case
from tools.conformance.zoo.hugging_face import ROWS, SMALL, VOCABULARY, of, tokens

_SAMPLES = 640
_EARS = {
    **SMALL,
    "vocab_size": 24,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
}


def _waves() -> Tensor:
    return torch.randn(ROWS, _SAMPLES)


def _wav2vec2(depth: int, **options: Any) -> nn.Module:
    config = of("Wav2Vec2Config")(
        **{**_EARS, "mask_time_prob": 0.0, **options}, num_hidden_layers=depth
    )
    made: nn.Module = of("Wav2Vec2ForCTC")(config)
    return made


def _ctc(output: Any, batch: Any) -> Tensor:
    scores = F.log_softmax(output.logits, dim=-1).transpose(0, 1)
    length = torch.full((scores.shape[1],), scores.shape[0])
    spoken = torch.full((scores.shape[1],), batch["letters"].shape[1])
    return F.ctc_loss(scores, batch["letters"], length, spoken)


def _speech() -> Batch:
    return {"input_values": _waves(), "letters": torch.randint(1, 24, (ROWS, 6))}


def _labelled_speech() -> Batch:
    return {"input_values": _waves(), "labels": torch.randint(3, 24, (ROWS, 6))}


def _classes(name: str, depth: int) -> nn.Module:
    options = {**_EARS, "mask_time_prob": 0.0, "num_hidden_layers": depth, "num_labels": 4}
    config = of(f"{name}Config")(**options)
    made: nn.Module = of(f"{name}ForSequenceClassification")(config)
    return made


def _heard() -> Batch:
    return {"input_values": _waves(), "labels": torch.randint(0, 4, (ROWS,))}


def _whisper(depth: int) -> nn.Module:
    config = of("WhisperConfig")(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        dropout=0.1,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=2,
    )
    made: nn.Module = of("WhisperForConditionalGeneration")(config)
    return made


def _dictation() -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 40), "labels": tokens(length=8)}


def _ast(depth: int) -> nn.Module:
    options = {
        key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    config = of("ASTConfig")(
        **options,
        num_hidden_layers=depth,
        hidden_dropout_prob=0.1,
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        num_labels=4,
    )
    made: nn.Module = of("ASTForAudioClassification")(config)
    return made


def _spectrograms() -> Batch:
    return {"input_values": torch.randn(ROWS, 32, 16), "labels": torch.randint(0, 4, (ROWS,))}


CASES = (
    Case("whisper", _whisper, _dictation),
    Case("wav2vec2", _wav2vec2, _speech, _ctc),
    # Labels are read in Python: the loss belongs into `loss(output, batch)`, as in "wav2vec2".
    Case("wav2vec2-ctc", _wav2vec2, _labelled_speech),
    Case("wav2vec2-classes", lambda depth: _classes("Wav2Vec2", depth), _heard),
    Case("hubert-classes", lambda depth: _classes("Hubert", depth), _heard),
    Case("wavlm-classes", lambda depth: _classes("WavLM", depth), _heard),
    Case(
        "wav2vec2-masked",
        lambda depth: _wav2vec2(depth, mask_time_prob=0.5, mask_time_length=4),
        _speech,
        _ctc,
    ),
    Case("ast", _ast, _spectrograms),
)
