"""How long compiling takes: `bigbrain-fx split` of GPTs of growing depth, whole command, wall time.

    python -m tools.bench compiling [--blocks 6,12,24,48,96] [--json]

Each row is the smallest of `--repeats` runs, less one `import torch` timed in the same minute (the
capture process pays it once). Lines are of the longest device file: they must not grow with depth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tools.bench.auto import equal_file

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4
MODEL = '''"""A GPT of {blocks} blocks, for timing."""
import sys

sys.path.insert(0, {root!r})
from models.gpt import GPT, example_batch, loss  # noqa: E402


def model() -> GPT:
    """Build it."""
    return GPT(blocks={blocks}, dim=256, heads=8, sequence=64, vocabulary=256, dropout=0.1)
'''


@dataclass(frozen=True)
class Row:
    """One depth: seconds of the whole command, the same less one `import torch`, lines, ops."""

    blocks: int
    wall_s: float
    compile_s: float
    longest_file_lines: int


@click.command()
@click.option("--blocks", default="6,12,24,48,96", show_default=True)
@click.option("--repeats", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(blocks: str, repeats: int, as_json: bool) -> None:
    """Print compile time by depth."""
    import_s = min(_timed([sys.executable, "-c", "import torch"]) for _ in range(3))
    if not as_json:
        click.echo(f"import torch {import_s:.2f} s; four devices, partitioner analytical")
        click.echo("blocks   whole command   less import torch   a block   longest device file")
    for count in (int(text) for text in blocks.split(",")):
        row = measure(count, repeats, import_s)
        if as_json:
            click.echo(json.dumps(asdict(row)))
            continue
        click.echo(
            f"{row.blocks:6d}   {row.wall_s:11.2f} s   {row.compile_s:15.2f} s   "
            f"{1e3 * row.compile_s / row.blocks:4.0f} ms   {row.longest_file_lines:5d} lines"
        )


def measure(blocks: int, repeats: int, import_s: float) -> Row:
    """Time one depth."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "model.py").write_text(MODEL.format(blocks=blocks, root=str(ROOT)))
        (folder / "cluster.json").write_text(json.dumps(equal_file(DEVICES)))
        wall_s = min(_split(folder) for _ in range(repeats))
        files = (folder / "bundle").glob("device_*.py")
        lines = max(len(path.read_text().splitlines()) for path in files)
    return Row(blocks, wall_s, wall_s - import_s, lines)


def _split(folder: Path) -> float:
    program = Path(sys.executable).with_name("bigbrain-fx")
    files = [str(folder / "model.py"), "--devices", str(folder / "cluster.json")]
    options = [
        "--out",
        str(folder / "bundle"),
        "--force",
        "--micro-batches",
        "8",
        "--json",
        "--no-cache",
    ]
    return _timed([str(program), "split", *files, *options])


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
