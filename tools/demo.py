"""The main job, start to end, on this machine: `make demo`.

Probe the host, split models/gpt.py over two CPU devices, train 30 steps on real text (the standard
library's own source), verify the bundle, and put the forecast beside the measurement.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bigbrain_fx import cli
from bigbrain_fx.bundles.launch import Run, RunOptions, StepLine, run
from bigbrain_fx.plan import read_plan

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-out"
NEXT = """
What to do next, after `source .venv/bin/activate`:
  bigbrain-fx explain demo-out/gpt      why it is cut there; demo-out/gpt/README.md: what to read
  bigbrain-fx init mine && cd mine      a model.py and a cluster.json to edit
  bigbrain-fx doctor --write cluster.json --force     this machine as it is, or --hosts a,b
  bigbrain-fx split model.py -d cluster.json && bigbrain-fx run bundle
docs/tutorials/first-split.md: five minutes, up to a killed process that is replaced;
docs/how-to/hugging-face.md: your checkpoint; docs/how-to/python-and-notebooks.md: from a script,
bb.machine("cluster.json").train(...)"""
STEPS = 30
WARM_UP = 5
console = Console(highlight=False)


def main() -> None:
    """Run the demo; every command that it shows can be typed just so."""
    OUT.mkdir(exist_ok=True)
    cluster, bundle = "demo-out/cluster.json", "demo-out/gpt"
    command("doctor", "--devices", "2", "--write", cluster, "--force")
    command("split", "models/gpt.py", "--devices", cluster, "--out", bundle, "--force")
    done = train(bundle)
    command("verify", bundle)
    compare(bundle, done)
    console.print(NEXT, soft_wrap=True)


def command(*words: str) -> None:
    """Show a command and run it."""
    console.print(f"\n[bold]$ bigbrain-fx {' '.join(words)}[/]")
    cli.main(list(words))


def train(bundle: str) -> Run:
    """Run the bundle with a progress bar; as `bigbrain-fx run --no-replay`."""
    console.print(f"\n[bold]$ bigbrain-fx run {bundle} --steps {STEPS}[/]")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps", total=STEPS, loss="-")

        def show(line: StepLine) -> None:
            progress.update(task, advance=1, loss=f"{line.loss:.3f}")

        done = run(OUT.parent / bundle, RunOptions(steps=STEPS), show)
    shown = ", ".join(f"{line.loss:.2f}" for line in done.steps[::5])
    console.print(f"loss, every fifth step: {shown}, {done.steps[-1].loss:.2f} at the last")
    if done.steps[-1].loss >= done.steps[0].loss:
        sys.exit("the loss did not fall")
    return done


def compare(bundle: str, done: Run) -> None:
    """Put the forecast beside what was measured."""
    forecast_s = read_plan(OUT.parent / bundle).forecast.step_s
    measured_s = statistics.median(line.step_s for line in done.steps[WARM_UP:])
    console.print(
        f"\nforecast {forecast_s:.3f} s a step, measured {measured_s:.3f} s "
        f"(median of {STEPS - WARM_UP} steps): forecast/measured {forecast_s / measured_s:.2f}"
    )


if __name__ == "__main__":
    main()
