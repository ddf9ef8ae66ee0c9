"""What the emitter writes, byte for byte, for six models and for each other kind of bundle.

`pytest --update-golden` rewrites it. Left out: the plan's key and the forecast, which change with
every change of an estimate; and the files that another bundle here shows already.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, make_plan
from tests.support import samples

GOLDEN = Path(__file__).parents[2] / "golden"
CELLS = {
    "gpt": ("naive", 2, "1f1b", 4),
    "unet": ("naive", 3, "gpipe", 4),
    "encdec": ("naive", 2, "1f1b", 8),
    "llama": ("chain-dp", 2, "1f1b", 4),
    "digits": ("naive", 2, "zb-h1", 8),
    "moe": ("naive", 2, "1f1b", 2),
}
SHOWN = ("device_*.py", "model_blocks.py", "functions.py", "README.md")  # of a bundle, unless
FILES = {  # digits has the whole bundle; a llama differs from a gpt by its blocks
    "digits": ("*",),
    "gpt": (*SHOWN, "training.py"),
    "llama": ("model_blocks.py",),
    **{
        name: (f"device_{device}.py", *SHOWN[1:])  # other devices are alike, or as a gpt's
        for name, device in (
            *(("unet", "d1"), ("moe", "d1"), ("opaque", "d1"), ("offload", "d1")),
            *(("tensor", "d0"), ("zero_3", "d0"), ("zb_v", "d0")),
        )
    },
}


@dataclass(frozen=True)
class Kind:
    """A bundle of two devices that differs from a pipeline: its model and what was asked for."""

    model: str
    options: Options
    leaves: tuple[str, ...] = ()


KINDS = {
    "zero_3": Kind("digits", Options("naive", micro_batches=4, replicas=2, zero_stage=3)),
    "tensor": Kind("gpt", Options("naive", micro_batches=4, tensor=2)),
    "zb_v": Kind("digits", Options("naive", micro_batches=4, schedule="zb-v")),
    "offload": Kind("digits", Options("naive", micro_batches=4, offload=("activations", "state"))),
    "opaque": Kind("moe", Options("naive", micro_batches=2), ("Mixture",)),
}


def with_disks() -> Cluster:
    """Describe the two devices of `samples.cluster`, each with a folder to offload into."""
    disk = '"folder": "/scratch", "capacity": "64GiB", "bandwidth": "500MB/s"'
    stores = (f'{{"name": "disk{i}", "device": "d{i}", {disk}}}' for i in range(2))
    text = samples.cluster_text(2).removesuffix("}")
    return parse_cluster(f'{text}, "stores": [{", ".join(stores)}]}}', "cluster.json")


def texts_of(kind: Kind) -> dict[str, str]:
    """Return the files of a bundle of a kind."""
    found = samples.sample(kind.model)
    graph = found.graph
    if kind.leaves:
        file = load_model_file(samples.ROOT / "models" / f"{kind.model}.py")
        graph = capture(file.model, file.example_batch, file.loss, leaves=kind.leaves).graph
    return bundle_texts(make_plan(graph, with_disks(), found.source, kind.options))


def steady(text: str) -> str:
    text = re.sub(r"plan=\"[0-9a-f]{16}\"", 'plan="0123456789abcdef"', text)
    text = re.sub(r"\d+\.\d+ s \| \d+ MiB \|", "0.000 s | 0 MiB |", text)
    text = re.sub(r"\d+\.\d+ ms where none comes late", "0.0 ms where none comes late", text)
    return re.sub(r"\d+\.\d+ s to read and write", "0.0000 s to read and write", text)


@pytest.mark.gate("digits", "encdec", "gpt")
@pytest.mark.parametrize("model", CELLS)
def test_golden(model: str, update_golden: bool) -> None:
    partitioner, devices, schedule, micro_batches = CELLS[model]
    texts = samples.texts(model, partitioner, devices, schedule, micro_batches)
    require_golden(model, texts, update_golden)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_kinds(kind: str, update_golden: bool) -> None:
    require_golden(kind, texts_of(KINDS[kind]), update_golden)


def require_golden(name: str, texts: Mapping[str, str], update: bool) -> None:
    shown = FILES.get(name, SHOWN)
    found = {file: steady(texts[file]) for file in texts if any(map(Path(file).match, shown))}
    folder = GOLDEN / name
    if update:
        write(folder, found)
    expected = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    differing = [diff(file, expected, found) for file in sorted({*expected, *found})]
    assert not any(differing), "\n".join(["see --update-golden", *filter(None, differing)])


def write(folder: Path, found: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, text in found.items():
        (folder / name).write_text(text)


def diff(name: str, expected: dict[str, str], found: dict[str, str]) -> str:
    old, new = (texts.get(name, "").splitlines() for texts in (expected, found))
    return "\n".join(
        difflib.unified_diff(old, new, f"golden/{name}", f"emitted/{name}", lineterm="")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('plan="0f0f0f0f0f0f0f0f", seed=3', 'plan="0123456789abcdef", seed=3'),
        ("| d0 | a | 0 | 44 | 0.010 s | 5 MiB |", "| d0 | a | 0 | 44 | 0.000 s | 0 MiB |"),
        ("9.01 MiB, 16.0 ms where none comes late", "9.01 MiB, 0.0 ms where none comes late"),
        ("76.0 KiB (0.0005 s to read and write", "76.0 KiB (0.0000 s to read and write"),
        ("dropout 0.1, 16 rows", "dropout 0.1, 16 rows"),
    ],
)
def test_forecasts_and_keys_alone_are_left_out(text: str, expected: str) -> None:
    assert steady(text) == expected
