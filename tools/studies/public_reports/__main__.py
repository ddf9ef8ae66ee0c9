"""Training code that practitioners reported: split, trained, and compared with a plain loop.

    python -m tools.studies.public_reports [NAME ...]

One line a model and option: what `split` made of it, and how far four steps of the bundle are from
a plain loop in the same micro-batches and from one over whole batches.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import click
import torch

import bigbrain_fx as bb
from bigbrain_fx.frontend import session
from bigbrain_fx.plan import read_plan
from tools.conformance.apart import apart, child_here
from tools.conformance.coverage import warm
from tools.conformance.forms.judge import LOSS, _apart_from, cluster
from tools.conformance.forms.loop import STEPS, train
from tools.studies.public_reports.still import still

MODELS = Path(__file__).parent / "models"


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Split and train the models, or those named."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        words = [sys.executable, "-m", "tools.studies.public_reports", *names]
        os.execve(sys.executable, words, {**os.environ, "OMP_NUM_THREADS": "1"})
    warm()
    for path in sorted(MODELS.glob("*.py")):
        for count in (None, 2) if not names or path.stem in names else ():
            said = tried(path, count)
            click.echo(f"{path.stem:22} {count or 'default':7} {said}")


def tried(path: Path, count: int | None) -> str:
    """Split and train one model; say what became of it."""
    with tempfile.TemporaryDirectory(prefix="report-") as scratch:
        folder = Path(scratch)
        (folder / "model.py").write_text(path.read_text())
        made = apart(partial(_split, folder, count), folder)
        if "status" in made:
            return f"{made['status']}: {made['detail'].splitlines()[0]} | {made.get('help', '')}"
        for stilled in (False, True):  # once more where a split step draws otherwise than a loop
            for part in (_loops, _train):
                found = apart(partial(part, folder, stilled), folder)
                if "status" in found:
                    what = f"{found['status']}: {found['detail'].splitlines()[0]}"
                    return f"{made['as']}, then {what}"
            if made["as"].startswith("opaque") or "differs from same" not in found["off"]:
                break
    return f"{made['as']}: {'draws stilled, ' * stilled}{found['off']} | {made['said']}"


def _split(folder: Path, count: int | None) -> Mapping[str, str]:
    options = bb.Options("auto", micro_batches=count)
    with mock.patch.object(session, "Child", child_here):
        made = bb.split(folder / "model.py", cluster(2), folder / "bundle", options)
    plan = made.plan
    kind = "opaque" if plan.graph.is_opaque_step else "split"
    used = f"{kind} over {len(plan.stages.devices)}, micro-batches {plan.micro_batches}"
    return {"as": used, "said": "; ".join(made.warnings)}


def _loops(folder: Path, stilled: bool) -> Mapping[str, str]:
    plan = read_plan(folder / "bundle")
    for name, count in (("same", plan.micro_batches), ("whole", 1)):
        sys.modules.pop("model", None)
        with still(stilled):
            found = train(folder / "model.py", count, keyed=plan.graph.is_opaque_step)
        torch.save(found, folder / f"{name}.pt")
    return {}


def _train(folder: Path, stilled: bool) -> Mapping[str, str]:
    from bigbrain_fx.verification.failures import error_of
    from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle

    bundle = folder / "bundle"
    try:
        with still(stilled):
            done = run_bundle(import_bundle(bundle), read_plan(bundle), STEPS, seed=0)
    except Exception as error:
        raise error_of(error, bundle, folder / "model.py") or error from error
    said = []
    for name in ("same", "whole"):
        losses, tensors = torch.load(folder / f"{name}.pt")
        ours = [float(loss) for loss in done.losses]
        off = max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, losses, strict=True))
        unlike = [*_apart_from(tensors, done.tensors)]
        equal = "equal to" if off <= LOSS and not unlike else "differs from"
        said.append(f"{equal} {name} (loss {off:.0e}, {len(unlike)} tensors)")
    return {"off": ", ".join(said)}


if __name__ == "__main__":
    main()
