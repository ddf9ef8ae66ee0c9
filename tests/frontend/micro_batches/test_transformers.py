"""Losses of transformers are means over labels that are not ignored: found by running the model."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from bigbrain_fx.core import LossCount
from bigbrain_fx.frontend import Training, capture, micro_batch_effect
from tests.support.hf_models import TEXT

LENGTHS = (2, 11, 3, 9, 1, 12, 4, 10)
KINDS = {"LlamaForCausalLM": 1, "BertForMaskedLM": 0}


def _tiny(name: str) -> nn.Module:
    kind = name.partition("For")[0]
    config = getattr(transformers, f"{kind}Config")(**TEXT, attn_implementation="eager")
    return getattr(transformers, name)(config)


def _batch(vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(1, vocabulary, (len(LENGTHS), 12))
    labels = ids.clone()
    for row, length in enumerate(LENGTHS):
        labels[row, : 12 - length] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.gate("LlamaForCausalLM-1")
@pytest.mark.parametrize(("name", "first"), KINDS.items())
def test_the_count_of_labels_is_found_shifted_or_not(name: str, first: int) -> None:
    torch.manual_seed(0)
    model: nn.Module = _tiny(name)
    batch = _batch(TEXT["vocab_size"])
    found = micro_batch_effect(Training(model, None, None), capture(model, batch), 4)
    assert found.is_equal
    assert found.loss_count == LossCount(("labels",), first, -100)
