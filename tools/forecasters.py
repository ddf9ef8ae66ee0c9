"""Hold others' forecasters against the published rows of language models, beside ours.

    python -m tools.forecasters --data DIR

Ours and the one-line rule need nothing; llm-analysis is asked where it is installed (`pip install
--no-deps llm-analysis fire termcolor`). It has FSDP's communication and no memory to spare: rows
that it would refuse for memory are asked with more. It says what a share of the peak makes of a
model: its own default is the peak, 0.5 is what its documentation says of training.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tools.published_gpus.__main__ import said_of
from tools.published_gpus.forecasts import Said
from tools.published_gpus.rows import Row, rows_or_end
from tools.published_gpus.table import HEAD, line

_SHAPES = {
    "125m": (12, 12, 768),
    "760m": (24, 12, 1536),
    "3b": (32, 20, 2560),
    "13b": (40, 40, 5120),
}
"""Layers, heads, width of MPT, as tools.published_gpus.architectures has them."""
_CARDS = {"a100-40": "a100-sxm-40gb", "a100-80": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
_VOCABULARY = 50368
_PLENTY_GB = 100_000


def forecasters() -> Mapping[str, Callable[[Said], float]]:
    """Return seconds by forecaster; those that are not installed are left out."""
    found: dict[str, Callable[[Said], float]] = {
        "ours": lambda said: said.step_s,
        "one line": lambda said: said.rule_s,
    }
    if importlib.util.find_spec("llm_analysis"):
        found["llm-analysis, its default"] = lambda said: llm_analysis_s(said.row, 1.0)
        found["llm-analysis at 0.5"] = lambda said: llm_analysis_s(said.row, 0.5)
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


def beside(said: Sequence[Said]) -> list[str]:
    """Return a line for each forecaster."""
    return [
        str(line(name, [replace(each, step_s=ask(each)) for each in said]))
        for name, ask in forecasters().items()
    ]


@click.command()
@click.option("--data", type=click.Path(path_type=Path))
def main(data: Path | None) -> None:
    """Print a line for each forecaster."""
    rows = [row for row in rows_or_end(data) if row.key.name.startswith("mpt")]
    click.echo(HEAD)
    click.echo("\n".join(beside(said_of(rows))))


if __name__ == "__main__":
    main()
