"""Capture the graphs that the table needs, once: needs torch, transformers and timm.

    python -m tools.studies.published_gpus.capturing [--only mpt]
        [--out tools/bench/published_gpus/data]

A graph keeps what estimators read; module paths, source lines and code are left out.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture, load_model_file
from tools.bench.published_gpus.graphs import FOLDER, Key, _adapter
from tools.studies.published_gpus.timm_names import TIMM

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_MODEL = '''"""A model that was measured."""
import sys
sys.path.insert(0, {root!r})
import torch
from tools.studies.published_gpus import architectures as a

autocast = {autocast!r}

def model():
    """Build it."""
    found = a.built({name!r}, {side}, fused={fused})
    return found.to(memory_format=torch.channels_last) if {last} else found

def example_batch():
    """Make two rows."""
    return {batch}

def loss(output, batch):
    """Train on it."""
    return a.{loss}(output, batch)
'''


@dataclass(frozen=True)
class Case:
    """A model to capture, in the file of one source."""

    file: str
    key: Key

    def text(self) -> str:
        """Return its model file."""
        key, last = self.key, self.key.layout == "nhwc"
        if key.name.startswith(("mpt", "bert", "gpt2")):
            batch, loss = f"a.tokens({key.side})", "token_loss"
        else:
            height = 160 if key.name.startswith("nnU") else key.side
            channels = 4 if key.name.startswith("nnU") else 3
            dense = int("net 2D" in key.name.lower() or "Net 2D" in key.name or "unet(" in key.name)
            batch = f"a.images({channels}, {height}, {key.side}, last={last}, dense={dense})"
            loss = "class_loss"
        autocast = None if key.precision == "float32" else key.precision
        root = str(Path(__file__).resolve().parents[3])
        return _MODEL.format(
            root=root,
            name=key.name,
            side=key.side,
            fused=key.task != "train",  # timm's rows of training are of torch 1.12
            last=last,
            batch=batch,
            loss=loss,
            autocast=autocast,
        )


def cases() -> Iterator[Case]:
    """Yield all that the public rows need."""
    for size in ("125m", "760m", "3b", "13b"):
        for length in _LENGTHS:
            yield Case("llm_foundry", Key(f"mpt-{size}", length, "train", "bfloat16"))
    for name, length in (("bert_large", 512), ("gpt2_large", 1024)):
        for task in ("train", "infer"):
            yield Case("neusight", Key(name, length, task, "float32"))
    for name, side in (("resnet50", 224), ("nnU-Net 2D", 192)):
        for task in ("train", "infer"):
            yield Case("deeplearningexamples", Key(name, side, task, "float32"))
            yield Case("deeplearningexamples", Key(name, side, task, "float16", "nhwc"))
            yield Case("deeplearningexamples", Key(name, side, task, "float16"))
    for name, side in (("resnet101", 224), ("unet(5,64)", 192), ("amoebanet-d(18,256)", 224)):
        yield Case("torchgpipe", Key(name, side, "train", "float32"))
    for name, side in TIMM.items():
        yield Case("timm", Key(name, side, "train", "float16", "nchw"))
        yield Case("timm", Key(name, side, "train", "float16", "nhwc"))
        yield Case("timm", Key(name, side, "infer", "float16", "nhwc"))


def captured(case: Case, folder: Path) -> Graph:
    """Capture one model in this process."""
    path = folder / "model.py"
    path.write_text(case.text())
    file = load_model_file(path, meta=True)
    training = case.key.task == "train"
    found = capture(
        file.model,
        file.example_batch,
        file.loss,
        training=training,
        name=case.key.name,
        autocast=file.autocast,
        loss_needed=False,
    )
    return lean(found.graph)


def lean(graph: Graph) -> Graph:
    """Leave out what no estimator reads."""
    ops = tuple(
        replace(op, modules=(), source="", code="", lines=(), body=op.body and lean(op.body))
        for op in graph.ops
    )
    return replace(graph, ops=ops, arguments=(), statements=(), output_names=())


def write_graphs(path: Path, graphs: Mapping[Key, Graph]) -> None:
    """Write a file; the same bytes for the same graphs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps([asdict(key), _adapter().dump_python(graph, mode="json", exclude_defaults=True)])
        for key, graph in graphs.items()
    )
    path.write_bytes(lzma.compress("\n".join(lines).encode(), preset=6))


@click.command()
@click.option("--only", default="", help="Names that begin so.")
@click.option("--file", "only_file", default="", help="Of this source.")
@click.option("--out", default=FOLDER, type=click.Path(path_type=Path), show_default=True)
def main(only: str, only_file: str, out: Path) -> None:
    """Capture every model; one that cannot be is said and left out."""
    found: dict[str, dict[Key, Graph]] = {}
    wanted = [c for c in cases() if c.key.name.startswith(only) and c.file.startswith(only_file)]
    with tempfile.TemporaryDirectory() as scratch:
        for case in wanted:
            started_s = time.perf_counter()
            try:
                graph = captured(case, Path(scratch))
            except (BigBrainError, RuntimeError, AssertionError, ValueError) as error:
                click.echo(f"{case.key}: left out: {str(error)[:300]}", err=True)
                continue
            took_s = time.perf_counter() - started_s
            fixed = f", only {graph.static_batch} rows" if graph.static_batch else ""
            click.echo(f"{case.key}: {len(graph.ops)} ops, {took_s:.1f} s{fixed}", err=True)
            found.setdefault(case.file, {})[case.key] = graph
            _keep(out, found)
    sys.exit(0 if found else 1)


def _keep(out: Path, found: Mapping[str, Mapping[Key, Graph]]) -> None:
    """Write the file of the last source again: a capture that is ended keeps what it has."""
    name = list(found)[-1]
    write_graphs(out / f"{name}.json.xz", found[name])


if __name__ == "__main__":
    main()
