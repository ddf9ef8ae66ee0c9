"""Tiny Hugging Face configurations, and checkpoints of them, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bigbrain_fx.frontend import load_model_file

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {**TEXT, "image_size": 16, "patch_size": 8}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}


def write_config(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Write a config.json into a folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_checkpoint(folder: Path, fields: Mapping[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """Write config.json and model.safetensors; return the state dict, ties under each name."""
    write_config(folder, fields)
    model: Any = load_model_file(f"hf:{folder}", seed=seed).model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder)
    return state


def in_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as two shards with an index."""
    names = list(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name].clone() for name in part}, folder / file)
    where = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def read(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(path)
    return found
