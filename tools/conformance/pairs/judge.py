"""One pair, judged: split by the command line, verified, trained, and compared with a plain loop.

    refused     exit code 2 or 3, in words, and nothing written
    bitwise     every link of `verify` is bitwise, and its weights are the loop's
    reference   likewise bitwise its reference, of which a link before, or the loop, is to rounding
    wrong       anything else; crash: a traceback

Every part runs in a copy of a process that has imported torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from bigbrain_fx.frontend import session
from bigbrain_fx.plan import read_plan
from bigbrain_fx.verification.child import verify_here
from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle
from bigbrain_fx.verification.links import WHOLE_BATCH
from tools.conformance.apart import apart, child_here
from tools.conformance.pairs import loops, running
from tools.conformance.pairs.calling import called, refusal
from tools.conformance.pairs.comparing import MICRO_BATCHES, compared, whole, write_cluster
from tools.conformance.pairs.features import Pair

MODEL = Path(__file__).with_name("model.txt")
STEPS = 4
CHOICES = ("--partitioner", "naive", "--micro-batches", str(MICRO_BATCHES))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a pair. `detail` says why, or how near; `help` is the remedy."""

    pair: str
    status: str
    detail: str = ""
    help: str = ""
    seconds: float = 0.0


def judge(pair: Pair) -> Outcome:
    """Do everything with a pair."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="pair-") as name:
        found = _judged(pair, Path(name))
    return Outcome(pair.name, seconds=round(time.perf_counter() - start, 1), **found)


def split(pair: Pair, folder: Path, words: Sequence[str]) -> Mapping[str, str]:
    """Split the model of a pair with these options; say how it was refused, or nothing."""
    model = folder / "letters.py"
    model.write_text(f"{MODEL.read_text()}\n\n{pair.lines}\n")
    devices = write_cluster(folder, pair.devices)
    bundle = folder / "bundle"
    return apart(partial(_split, model, devices, bundle, (*CHOICES, *words)), folder)


def _judged(pair: Pair, folder: Path) -> Mapping[str, str]:
    watched = ("--with", "watch") if "P" in pair.name.split("+") else ()  # `launch.py` takes --hang
    made = split(pair, folder, (*pair.words, *watched))
    if "status" in made:
        if (folder / "bundle").exists():
            return {**made, "status": "wrong", "detail": f"left a bundle: {made['detail']}"}
        return made
    if pair.later:
        return running.after(pair, folder)
    checked = apart(partial(_verify, folder / "bundle"), folder)
    if checked["status"] not in ("bitwise", "reference") or "I" in pair.name:
        return checked
    trained = apart(partial(_train, pair, folder), folder)
    return trained if checked["status"] == "bitwise" else {**trained, "status": _worse(trained)}


def _worse(found: Mapping[str, str]) -> str:
    return "reference" if found["status"] == "bitwise" else found["status"]


def _split(model: Path, devices: Path, bundle: Path, words: Sequence[str]) -> Mapping[str, str]:
    about = map(str, (model, "-d", devices, "-o", bundle))
    with mock.patch.object(session, "Child", child_here):
        code, text = called("split", *about, "--json", *words)
    return refusal(code, text) if code else {}


def _verify(bundle: Path) -> Mapping[str, str]:
    wanted = {"bundle": str(bundle), "model": None, "steps": 3, "processes": None}
    checks = verify_here(wanted)
    wrong = [c for c in checks if c["passed"] is not True]
    if wrong:
        return {
            "status": "wrong",
            "detail": "; ".join(f"{c['name']}: {c['detail']}" for c in wrong),
        }
    own = [c for c in checks if c["name"] != WHOLE_BATCH]  # that one is of the model alone
    rounded = [str(c["detail"]) for c in own if c.get("rounded")]
    return {"status": "reference" if rounded else "bitwise", "detail": "; ".join(rounded)}


def _train(pair: Pair, folder: Path) -> Mapping[str, str]:
    made = read_plan(folder / "bundle")
    done = run_bundle(import_bundle(folder / "bundle"), made, STEPS, seed=0)
    if "As" in pair.name:  # each stage has its own delay: its recurrence is in `verify`
        return {"status": "reference", "detail": "no plain loop of it"}
    wanted = loops.of(pair.name)(loops.read(folder / "letters.py"), MICRO_BATCHES, STEPS)
    losses = [float(loss) for loss in done.losses]
    return compared(pair, wanted, (losses, whole(made, done.tensors)))
