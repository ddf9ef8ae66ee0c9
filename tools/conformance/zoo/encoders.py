"""Encoders of text: masked words, classes of sentences, answers, tags."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.conformance.zoo.case import Batch
from tools.conformance.zoo.hugging_face import (
    ROWS,
    VOCABULARY,
    padded_next_token,
    padding,
    sentences,
    text_case,
    tokens,
)

_classes = partial(text_case, batch=sentences)
_words = partial(text_case, batch=padded_next_token)


# Without it DeBERTa looks for the rows that have a label: their number is data.
_ONE_LABEL: dict[str, Any] = {"problem_type": "single_label_classification"}


def _answers() -> Batch:
    mask = padding()
    return {
        "input_ids": tokens().masked_fill(mask == 0, 2),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
        "start_positions": torch.randint(0, 8, (ROWS,)),
        "end_positions": torch.randint(0, 8, (ROWS,)),
    }


def _answered_sentences() -> Batch:
    batch = dict(cast("Mapping[str, object]", sentences()))
    batch["answers"] = batch.pop("labels")
    return batch


def _classes_loss(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.logits, batch["answers"])


CASES = (
    _words("bert", "BertConfig", "BertForMaskedLM"),
    _classes("bert-classes", "BertConfig", "BertForSequenceClassification"),
    text_case("bert-answers", "BertConfig", "BertForQuestionAnswering", batch=_answers),
    _words("bert-tags", "BertConfig", "BertForTokenClassification", num_labels=VOCABULARY),
    _words("roberta", "RobertaConfig", "RobertaForMaskedLM"),
    _classes("roberta-classes", "RobertaConfig", "RobertaForSequenceClassification"),
    _classes(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        layers="n_layers",
        dim=32,
        n_heads=4,
        hidden_dim=64,
        hidden_size=None,
    ),
    _words("albert", "AlbertConfig", "AlbertForMaskedLM", embedding_size=16),
    _classes("electra", "ElectraConfig", "ElectraForSequenceClassification", embedding_size=16),
    _classes("deberta", "DebertaConfig", "DebertaForSequenceClassification", **_ONE_LABEL),
    _classes(
        "deberta-v2",
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        **_ONE_LABEL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _classes(
        "deberta-rows-by-label",
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
    ),
    text_case(
        "deberta-rows-by-label-remedied",
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        batch=_answered_sentences,
        loss=_classes_loss,
    ),
    _classes(
        "xlnet",
        "XLNetConfig",
        "XLNetForSequenceClassification",
        layers="n_layer",
        d_model=32,
        n_head=4,
        d_inner=64,
        max_position_embeddings=None,
    ),
    _words("bigbird", "BigBirdConfig", "BigBirdForMaskedLM", attention_type="original_full"),
    _words(
        "bigbird-sparse",
        "BigBirdConfig",
        "BigBirdForMaskedLM",
        batch=lambda: {"input_ids": tokens(length=64), "labels": tokens(length=64)},
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=2,
    ),
    _words("longformer", "LongformerConfig", "LongformerForMaskedLM", attention_window=8),
    _classes(  # its first token sees all others: which tokens do is data
        "longformer-global",
        "LongformerConfig",
        "LongformerForSequenceClassification",
        attention_window=8,
    ),
    _classes(
        "longformer-global-remedied",
        "LongformerConfig",
        "LongformerForSequenceClassification",
        attention_window=8,
        leaves=("LongformerSelfAttention",),
    ),
    _classes("mpnet", "MPNetConfig", "MPNetForSequenceClassification"),
    _classes("convbert", "ConvBertConfig", "ConvBertForSequenceClassification", embedding_size=16),
    _classes(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        local_attention=8,
        cls_token_id=0,
        sep_token_id=1,
    ),
    text_case(
        "fnet",
        "FNetConfig",
        "FNetForSequenceClassification",
        batch=lambda: {"input_ids": tokens(), "labels": torch.randint(0, 2, (ROWS,))},
    ),
    _classes(
        "funnel",
        "FunnelConfig",
        "FunnelForSequenceClassification",
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        block_sizes=[2, 2],
        num_decoder_layers=1,
        layers="",
    ),
    _classes(
        "nystromformer",
        "NystromformerConfig",
        "NystromformerForSequenceClassification",
        num_landmarks=16,
        segment_means_seq_len=16,
    ),
)
