"""A Hugging Face causal language model with data of your own: next token, cross-entropy.

As it stands it builds a small Llama without weights and reads bytes of Python's own source text, so
it runs anywhere. To fine-tune a checkpoint of yours, set CHECKPOINT to its folder; and give your
tokens: a file with a tensor `tokens`, as TOKENS says, from any tokenizer.

    safetensors.torch.save_file({"tokens": torch.tensor(tokenizer(text)["input_ids"])}, TOKENS)
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

CHECKPOINT = os.environ.get("CHECKPOINT", "")  # a folder with config.json and *.safetensors
TOKENS = os.environ.get("TOKENS", "")  # a .safetensors file
SEQUENCE = 64  # tokens a row
BATCH = 8  # rows of a mini-batch
LAST_LAYERS = 0  # train only so many layers and the head; 0 trains all
LORA = int(os.environ.get("LORA", "0"))  # train only adapters of this rank (needs peft); 0: none

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=SEQUENCE,
    use_cache=False,
)


def model() -> nn.Module:
    """Build the model, or read the checkpoint; freeze what is not to be trained."""
    if CHECKPOINT:
        found = AutoModelForCausalLM.from_pretrained(CHECKPOINT, use_cache=False)
    else:
        found = AutoModelForCausalLM.from_config(SMALL)
    if LAST_LAYERS:
        found.requires_grad_(False)
        for layer in found.model.layers[-LAST_LAYERS:]:
            layer.requires_grad_(True)
        found.lm_head.requires_grad_(True)
    return with_adapters(found) if LORA else found


def with_adapters(found: nn.Module) -> nn.Module:
    """Put LoRA's adapters beside all projections, and freeze all else."""
    from peft import LoraConfig, inject_adapter_in_model

    wanted = ["q_proj", "k_proj", "v_proj", "o_proj"]
    made: nn.Module = inject_adapter_in_model(LoraConfig(r=LORA, target_modules=wanted), found)
    return made


def example_batch() -> dict[str, Tensor]:
    """Return one mini-batch: `labels` make the model return its own loss."""
    return next(batches(seed=0))


def tokens() -> Tensor:
    """Return all tokens in a row: the file's, or bytes."""
    if TOKENS:
        return load_file(TOKENS)["tokens"].long().flatten()
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random windows of the tokens; the t-th batch depends on seed and t alone."""
    data, window = tokens(), torch.arange(SEQUENCE)
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - SEQUENCE, (BATCH, 1), generator=dice)
        rows = data[starts + window]
        yield {"input_ids": rows, "labels": rows.clone()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW, with a rate for training from scratch; 2e-5 suits a checkpoint."""
    return torch.optim.AdamW(named_params, lr=2e-5 if CHECKPOINT else 1e-3)
