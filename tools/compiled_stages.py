"""What --compile gives on this CPU: processor time of a step, compiled stages over plain ones.

    python -m tools.compiled_stages [--models gpt,resnet,llama] [--rounds 8] [--steps 3]

Each model is split over two devices with --compile; all devices of the bundle run in one process,
once as they are and once as a plan without --compile would run them, in rounds in turn. A round is
some steps; the first step of each, in which it compiles, is told apart.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True)
class CompiledRow:
    """Seconds of processor time a step, and what the first steps took, compiling or not.

    `low` and `high` are the quartiles of the rounds' ratios.
    """

    model: str
    plain_s: float
    compiled_s: float
    ratio: float
    low: float
    high: float
    first_plain_s: float
    first_compiled_s: float


@click.command()
@click.option("--models", default="gpt,resnet,llama", show_default=True)
@click.option("--rounds", default=8, show_default=True)
@click.option("--steps", default=3, show_default=True, help="Of a round.")
@click.option("--json", "as_json", is_flag=True)
def main(models: str, rounds: int, steps: int, as_json: bool) -> None:
    """Print a row for each model."""
    if not as_json:
        click.echo("| model | plain | compiled | compiled/plain (quartiles) | first steps |")
        click.echo("|---|---|---|---|---|")
    for model in models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(model, Path(folder), rounds, steps)
        if as_json:
            click.echo(json.dumps(asdict(row)))
            continue
        click.echo(
            f"| {row.model} | {row.plain_s:.3f} s | {row.compiled_s:.3f} s | {row.ratio:.2f} "
            f"({row.low:.2f} to {row.high:.2f}) | {row.first_plain_s:.1f} s, "
            f"{row.first_compiled_s:.1f} s |"
        )


def measure(model: str, folder: Path, rounds: int, steps: int) -> CompiledRow:
    """Split a model, and let a process of its own run the bundle both ways."""
    from bigbrain_fx import bundles
    from bigbrain_fx.core import Cluster, Device, Link
    from bigbrain_fx.plan import Options

    devices = tuple(Device(f"d{i}", "h", "cpu", 4 << 30, 1e10, 1e10, 1e-6) for i in range(2))
    options = Options("analytical", micro_batches=2, compiled=True)
    path, bundle = folder / "model.py", folder / "bundle"
    text = (ROOT / "models" / f"{model}.py").read_text()
    path.write_text(text.replace("DROPOUT = 0.1", "DROPOUT = 0.0"))  # compiled code draws otherwise
    bundles.split(path, Cluster(devices, Link(5e-5, 1e9)), bundle, options)
    words = [sys.executable, "-P", __file__, str(bundle), str(rounds), str(steps)]
    done = subprocess.run(words, check=True, capture_output=True, timeout=TIME_LIMIT_S)
    first, ways = json.loads(done.stdout.splitlines()[-1])
    ratios = [after / before for before, after in zip(*ways, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain_s, compiled_s = map(statistics.median, ways)
    return CompiledRow(model, plain_s, compiled_s, middle, low, high, first[0], first[1])


def run_both(bundle: Path, rounds: int, steps: int) -> tuple[list[float], list[list[float]]]:
    """Run a bundle plainly and compiled; return each way's first step, and seconds by round."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(bundle))
    train = importlib.import_module("train")
    runtime = importlib.import_module("runtime.train")
    ways = [_devices(train, runtime, compiled=compiled) for compiled in (False, True)]
    first = [_step_s(runtime, *way, 0, 1) for way in ways]
    for way in ways:
        _step_s(runtime, *way, 1, 2)
    found: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            begin = 2 + number * steps
            found[which].append(_step_s(runtime, *ways[which], begin, begin + steps))
    return first, found


def _devices(train: Any, runtime: Any, *, compiled: bool) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """Return what one process needs to run all devices, as a plan with or without --compile."""
    import torch

    local, bundle = importlib.import_module("runtime.local"), train.BUNDLE
    hub = local.Hub({cls.name: 1 for cls in bundle.devices})
    made = {}
    for rank, cls in enumerate(bundle.devices):
        cls.compiled = compiled
        transport = local.LocalTransport(hub)
        made[cls.name] = runtime.make_device(bundle, rank, transport, 0, torch.device("cpu"))
    return hub, made


def _step_s(runtime: Any, hub: Any, devices: dict[str, Any], first: int, end: int) -> float:  # noqa: ANN401
    """Run some steps; return the processor time of one."""
    run = {n: partial(runtime.run_steps, d, end, None, None, first) for n, d in devices.items()}
    begin = time.process_time()
    hub.run(run)
    return (time.process_time() - begin) / (end - first)


if __name__ == "__main__" and len(sys.argv) == 4 and sys.argv[1].startswith("/"):
    print(json.dumps(run_both(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
elif __name__ == "__main__":
    main()
