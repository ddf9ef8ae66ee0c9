"""Build transformers models from configurations, and the batches that go with them.

This file knows how that library names things; it knows no single model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tools.conformance.zoo.case import DEPTH, Batch, Case, Loss

ROWS, LENGTH, VOCABULARY = 4, 16, 96
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def of(name: str) -> Any:
    """Return a class of transformers; its own annotations say what each option must be."""
    return getattr(transformers, name)


def built(config: str, model: str, **options: Any) -> nn.Module:
    """Build one model from a configuration class and its options."""
    made: nn.Module = of(model)(of(config)(**options))
    return made


def text_case(
    name: str,
    config: str,
    model: str,
    *,
    batch: Callable[[], Batch],
    layers: str = "num_hidden_layers",
    change: Callable[[nn.Module], None] | None = None,
    refused: bool = False,
    remedy: str = "",
    leaves: tuple[str, ...] = (),
    loss: Loss | None = None,
    depth: int = DEPTH,
    **options: Any,
) -> Case:
    """Return a case of a text model: `SMALL`, changed by the options.

    Args:
        name: of the case.
        config: its configuration class in transformers.
        model: its model class.
        batch: makes the batch.
        layers: names, with spaces between, of the options that count layers.
        change: done to the model once it is built.
        refused: see `Case`.
        remedy: see `Case`.
        leaves: see `Case`.
        loss: see `Case`.
        depth: see `Case`.
        options: of the configuration; None leaves an option of `SMALL` out.
    """
    merged = {key: value for key, value in {**SMALL, **options}.items() if value is not None}

    def build(depth: int) -> nn.Module:
        counts = dict.fromkeys(layers.split(), depth)
        made = built(config, model, **{**merged, **counts})
        if change is not None:
            change(made)
        return made

    return Case(
        name, build, batch, loss, depth=depth, refused=refused, remedy=remedy, leaves=leaves
    )


def tokens(rows: int = ROWS, length: int = LENGTH, low: int = 3, high: int = VOCABULARY) -> Tensor:
    """Return random token ids, none of them a special one."""
    return torch.randint(low, high, (rows, length))


def padding(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return an attention mask: every row has a different number of tokens."""
    lengths = torch.arange(length, length - rows, -1)
    return (torch.arange(length) < lengths[:, None]).long()


def next_token() -> Batch:
    """Return a batch of a language model."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def padded_next_token() -> Batch:
    """Return a batch of a language model as a tokenizer gives it: rows of unlike length."""
    ids, mask = tokens(), padding()
    return {
        "input_ids": ids.masked_fill(mask == 0, 2),
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def sentences() -> Batch:
    """Return a batch of padded sentences, each with a class."""
    mask = padding()
    return {
        "input_ids": tokens().masked_fill(mask == 0, 2),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (ROWS,)),
    }


def translations() -> Batch:
    """Return a batch of padded sentences and the sentences to answer with."""
    mask = padding()
    return {
        "input_ids": tokens().masked_fill(mask == 0, 2),
        "attention_mask": mask,
        "labels": tokens(length=8),
    }
