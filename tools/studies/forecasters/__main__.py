"""Hold others' forecasters against the published rows of language models, beside ours.

    python -m tools.studies.forecasters --data DIR [--calculon PATH] [--longest 2048]

Ours and the one-line rule need nothing; llm-analysis is asked where it is installed (`pip install
--no-deps llm-analysis fire termcolor`), Calculon where a checkout of calculon-ai/calculon on GitHub
is named (`pip install psutil`). Neither has memory to spare: rows that it would refuse for memory
are asked with more. llm-analysis has FSDP's communication and says what a share of the peak makes
of a model: its own default is the peak, 0.5 is what its documentation says of training. Calculon
has shares of its own by the size of a product; it has Megatron's sharding of the optimizer and no
FSDP, no vocabulary, and an attention that writes its scores, as MPT's (flash) does not: `--longest`
leaves out the rows where these are most of the step.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tools.bench.published_gpus.__main__ import said_of
from tools.bench.published_gpus.forecasts import Said
from tools.bench.published_gpus.rows import Row
from tools.bench.published_gpus.table import HEAD, line
from tools.studies.published_gpus.__main__ import rows_or_end

_SHAPES = {
    "125m": (12, 12, 768),
    "760m": (24, 12, 1536),
    "3b": (32, 20, 2560),
    "13b": (40, 40, 5120),
}
"""Layers, heads, width of MPT, as tools.studies.published_gpus.architectures has them."""
_CARDS = {"a100-40": "a100-sxm-40gb", "a100-80": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
_VOCABULARY = 50368
_PLENTY_GB = 100_000
_CALCULON_CARDS = {"a100-40": "a100_80g", "a100-80": "a100_80g", "h100": "h100_80g_nvl8"}
_A100_40_GB_PER_S = 1555  # the one figure of an A100 of 40 GB that Calculon's file of 80 has not
_GPUS_A_HOST = 8


def forecasters(calculon: Path | None = None) -> Mapping[str, Callable[[Said], float]]:
    """Return seconds by forecaster; those that are not installed are left out."""
    found: dict[str, Callable[[Said], float]] = {
        "ours": lambda said: said.step_s,
        "one line": lambda said: said.rule_s,
    }
    if importlib.util.find_spec("llm_analysis"):
        found["llm-analysis, its default"] = lambda said: llm_analysis_s(said.row, 1.0)
        found["llm-analysis at 0.5"] = lambda said: llm_analysis_s(said.row, 0.5)
    if calculon:
        for overlap in (True, False):
            ask = partial(calculon_s, calculon, overlap=overlap)
            found[f"Calculon, messages {'beside' if overlap else 'after'}"] = ask
    return found


def llm_analysis_s(row: Row, efficiency: float) -> float:
    """Return what llm-analysis forecasts of a row of MPT."""
    logging.disable(logging.CRITICAL)
    config: Any = importlib.import_module("llm_analysis.config")
    analysis: Any = importlib.import_module("llm_analysis.analysis")
    layers, heads, width = _SHAPES[row.key.name.removeprefix("mpt-")]
    model = config.ModelConfig(
        row.key.name, layers, heads, width, _VOCABULARY, max_seq_len=row.key.side
    )
    card = config.get_gpu_config_by_name(_CARDS[row.card])
    card.mem_per_GPU_in_GB = _PLENTY_GB
    asked = analysis.LLMAnalysis(
        model,
        card,
        config.get_dtype_config_by_name("w16a16e16"),
        config.ParallelismConfig(dp_size=row.gpus),
        flops_efficiency=efficiency,
    )
    kinds = analysis.ActivationRecomputation
    made = asked.training(
        batch_size_per_gpu=row.micro_batch,
        gradient_accumulation_steps=row.accum,
        seq_len=row.key.side,
        activation_recomputation=kinds.FULL if row.recompute else kinds.NONE,
        ds_zero=analysis.DSZeRO.STAGE_3,
    )
    return float(made["latency_per_iter"])


def calculon_s(checkout: Path, said: Said, *, overlap: bool) -> float:
    """Return what Calculon forecasts of a row of MPT, by its own files of systems."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    llm: Any = importlib.import_module("calculon.llm").Llm
    system: Any = importlib.import_module("calculon.system").System
    layers, heads, width = _SHAPES[said.row.key.name.removeprefix("mpt-")]
    model = llm.Application(
        {
            "hidden": width,
            "feedforward": 4 * width,
            "seq_size": said.row.key.side,
            "attn_heads": heads,
            "attn_size": width // heads,
            "num_blocks": layers,
        }
    )
    asked = llm(model, logging.getLogger("calculon"))
    card = system(_calculon_system(checkout, said.row.card))
    asked.compile(card, llm.Execution.from_json(_calculon_execution(said.row, overlap)))
    asked.run(card)
    return float(asked.get_total_time())


def _calculon_system(checkout: Path, card: str) -> dict[str, Any]:
    """Return its file of a card's system, with memory for every row."""
    path = checkout / "systems" / f"{_CALCULON_CARDS[card]}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["mem1"]["GiB"] = _PLENTY_GB
    if card == "a100-40":
        found["mem1"]["GBps"] = _A100_40_GB_PER_S
    return found


def _calculon_execution(row: Row, overlap: bool) -> dict[str, Any]:
    """Return a row in the fields of `calculon/llm/llm.py`, Execution: replicas alone."""
    return {
        "num_procs": row.gpus,
        "tensor_par": 1,
        "pipeline_par": 1,
        "data_par": row.gpus,
        "tensor_par_net": 0,
        "pipeline_par_net": 0,
        "data_par_net": int(row.gpus > _GPUS_A_HOST),
        "batch_size": row.samples * row.gpus,
        "microbatch_size": row.micro_batch,
        "datatype": "float16",  # its files have no bfloat16, which is as fast
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": "full" if row.recompute else "none",
        "pipeline_interleaving": 1,
        "optimizer_sharding": True,
        "tensor_par_comm_type": "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": overlap,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def beside(said: Sequence[Said], calculon: Path | None = None) -> list[str]:
    """Return a line for each forecaster."""
    return [
        str(line(name, [replace(each, step_s=ask(each)) for each in said]))
        for name, ask in forecasters(calculon).items()
    ]


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
@click.option("--calculon", type=click.Path(path_type=Path), help="A checkout of Calculon.")
@click.option("--longest", type=int, help="Only rows of so many tokens a sequence, and fewer.")
def main(data: Path | None, calculon: Path | None, longest: int | None) -> None:
    """Print a line for each forecaster."""
    rows = [row for row in rows_or_end(data) if row.key.name.startswith("mpt")]
    if longest:
        rows = [row for row in rows if row.key.side <= longest]
    if not calculon or not (calculon / "calculon").is_dir():
        click.echo(f"no Calculon in {calculon or '--calculon PATH'}: it is not asked")
        calculon = None
    click.echo(HEAD)
    click.echo("\n".join(beside(said_of(rows), calculon)))
    click.echo(line("ours, at the usual shares", said_of(rows, usual=True)))


if __name__ == "__main__":
    main()
