"""Every kind of transformers' models, small: does it train in eager, and does it split?

    python -m tools.studies.transformers_sweep --out rows.jsonl --only llama --only bert

One line of JSON a kind, as it is known; kinds that `--out` has already are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)
SIZES = {  # what configurations call the sizes of a model
    "vocab_size": 128,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "rotary_dim": 8,
    "image_size": 32,
    "patch_size": 8,
}
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
EAGER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (12 << 30,) * 2)  # some keep the sizes of their default
import torch
from bigbrain_fx.frontend.hf.model import load_hf
from bigbrain_fx.frontend.location import hf_location
model, batch = load_hf(hf_location("hf:" + sys.argv[1] + "?batch=4&seq=16"), 0)
model.train()
loss = model(**batch).loss
loss.backward()
assert loss.isfinite(), "the loss is not finite"
print(sum(p.numel() for p in model.parameters()))
"""
CLUSTER = {
    "devices": [
        {"name": name, "kind": "cpu", "memory": "8GiB", "flops": "60GFLOP/s"}
        | {"memory_bandwidth": "12GB/s"}
        for name in ("d0", "d1")
    ],
    "links": {"default": {"bandwidth": "1GB/s", "latency": "50us"}},
}
EAGER_S, SPLIT_S = 120.0, 300.0


def kinds() -> Iterator[tuple[str, str]]:
    """Yield each `model_type` and the class that trains it."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    seen: set[str] = set()
    for task in TASKS:
        for kind, name in getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if kind not in seen:
                seen.add(kind)
                yield kind, name if isinstance(name, str) else name[0]


def written(kind: str, name: str, folder: Path) -> Path:
    """Write a small configuration: the sizes of `SIZES` where the class has them."""
    known: Any = importlib.import_module("transformers").CONFIG_MAPPING[kind]
    config = _small(known())
    path = folder / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "model_type": kind, "architectures": [name]}))
    return path


def _small(config: Any) -> Any:  # noqa: ANN401  # transformers' own class
    for field, size in SIZES.items():
        if isinstance(getattr(config, field, None), int):
            with contextlib.suppress(Exception):  # one that follows from others
                setattr(config, field, size)
    for field in IDS:
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, 1)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1  # a checkpoint's configuration says it
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    return config


def tried(kind: str, name: str) -> Mapping[str, object]:
    """Train one in eager; where it does, split it over two devices."""
    row: dict[str, object] = {"kind": kind, "class": name}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            path = written(kind, name, folder)
        except Exception as error:
            return {**row, "outcome": "no configuration", "why": _first(str(error))}
        code, said = _run([sys.executable, "-c", EAGER, str(path)], EAGER_S)
        if code:
            return {**row, "outcome": "not in eager", "why": _last(said)}
        return {**row, "parameters": int(said.split()[-1]), **_split(path, folder)}


def _split(path: Path, folder: Path) -> Mapping[str, object]:
    cluster = folder / "cluster.json"
    cluster.write_text(json.dumps(CLUSTER))
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "bigbrain_fx", "split", f"hf:{path}?batch=4&seq=16"]
    command += ["--devices", str(cluster), "--out", str(folder / "bundle")]
    command += ["--partitioner", "naive", "--micro-batches", "2"]
    code, said = _run(command, SPLIT_S)
    seconds = round(time.monotonic() - begun_s, 1)
    if code:
        return {"outcome": "refused", "why": _last(said), "seconds": seconds}
    ops = json.loads((folder / "bundle" / "plan.json").read_text())["graph"]["ops"]
    is_opaque = len(ops) == 1
    compared = "beside your own loop" in said
    warned = [line for line in said.splitlines() if line.startswith("warning")]
    outcome = "whole" if is_opaque else "split"
    return {"outcome": outcome, "compared": compared, "warnings": warned, "seconds": seconds}


def _run(command: list[str], limit_s: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {limit_s:g} s"
    return done.returncode, done.stdout


def _first(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def _last(text: str) -> str:
    """Return the error of what a command has printed."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines[-1:] or [""])[0][:300]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Lines of JSON.")
@click.option("--only", multiple=True, help="A model_type; else all.")
def main(out: Path, only: tuple[str, ...]) -> None:
    """Try every kind of model that transformers trains, small, in eager and split."""
    lines = out.read_text().splitlines() if out.exists() else []
    known = {json.loads(line)["kind"] for line in lines}
    for kind, name in kinds():
        if kind in known or (only and kind not in only):
            continue
        row = tried(kind, name)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        click.echo(f"{kind:24} {row['outcome']:16} {row.get('why', '')}")


if __name__ == "__main__":
    main()
