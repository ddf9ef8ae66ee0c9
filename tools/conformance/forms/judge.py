"""One form, judged: split over two devices, verified, run, and compared with the plain loop.

Every part runs in a fork of a process that has imported torch. Outcomes:

    right     `verify` passes with no link left out, and the bundle trains as the loop does
    warned    the same, and `split` warns that the loop's micro-batches are not the whole batch
    opaque    the same, and the whole step runs on one device, as the user wrote it
    refused   before anything is written, with what to do
    stopped   split, and stopped with what to do where the data are not such as the example
    late      split, and found to be different by `verify` only
    wrong     split, verified, and other numbers than the loop
    useless   refused without a line or without a remedy
    crash     a traceback, of whichever part
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import bigbrain_fx as bb
import partitioners
from bigbrain_fx.core import Cluster, Device, DeviceStore, Link
from bigbrain_fx.frontend import session
from bigbrain_fx.plan import half_sums, half_values, read_plan
from tools.conformance.apart import apart, child_here
from tools.conformance.forms import Form
from tools.conformance.forms.halves import Halves
from tools.conformance.forms.loop import STEPS, train

LOSS = 2e-5  # of the loss: float32 over some steps
HALF_LOSS = 5e-3  # where gradients are added in sixteen bits, in another order
_HALF = 2e-2  # of a tensor's largest, likewise


@dataclass(frozen=True)
class Outcome:
    """Outcome of a form. `detail` says why, or how near it is; `help` is the remedy."""

    form: str
    status: str
    detail: str = ""
    help: str = ""
    seconds: float = 0.0


def judge(form: Form) -> Outcome:
    """Split, verify, run and compare one form."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"form-{form.name}-") as scratch:
        folder = Path(scratch)
        path = folder / "model.py"
        path.write_text(form.source)
        found = dict(_judged(form, path, folder))
    return Outcome(form.name, seconds=round(time.perf_counter() - start, 1), **found)


def _judged(form: Form, path: Path, folder: Path) -> Mapping[str, str]:
    made = apart(lambda: _split(form, path, folder), folder)
    if "status" in made:
        if (folder / "bundle").exists():
            return {**made, "status": "crash", "detail": f"left a bundle: {made['detail']}"}
        return made
    loop = apart(lambda: _loop(path, folder), folder)
    if "status" in loop:
        return {**loop, "status": "crash", "detail": f"the loop itself: {loop['detail']}"}
    status = made["as"]
    for part in (_verify, _train):
        found = apart(partial(part, form, path, folder), folder)
        if "warns" in found:
            status = "warned" if found["warns"] in made["said"] else "unseen"
        if "status" in found:
            return {**found, "status": "stopped"} if found["status"] == "refused" else found
    return {"status": status, "detail": made["said"]}


def _loop(path: Path, folder: Path) -> Mapping[str, str]:
    made = read_plan(folder / "bundle")
    found = train(path, made.micro_batches, keyed=made.graph.is_opaque_step)
    torch.save(found, folder / "loop.pt")
    return {}


def _split(form: Form, path: Path, folder: Path) -> Mapping[str, str]:
    options = _options(form)
    ways = {**partitioners.TABLE, Halves.name: Halves}
    with (
        mock.patch.object(session, "Child", child_here),
        mock.patch.object(partitioners, "TABLE", ways),
    ):
        devices = int(form.option("devices") or 2 * int(form.option("replicas", "1")))
        made = bb.split(path, _cluster(form, devices, folder), folder / "bundle", options)
    kind = "opaque" if made.plan.graph.is_opaque_step else "right"
    return {"said": "; ".join(made.warnings), "as": kind}


def _options(form: Form) -> bb.Options:
    made = bb.Options("halves", micro_batches=form.micro_batches, leaves=form.leaves)
    given: dict[str, Any] = {
        _FIELDS.get(name, name.replace("-", "_")): _KINDS.get(name, str)(value)
        for name, value in form.options
        if name != "devices"
    }
    return replace(made, **given)


def _shares(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(":")))


def _stages(text: str) -> object:
    return tuple(map(int, text.split(","))) if text[0].isdigit() else text


_FIELDS = {"zero": "zero_stage"}
_KINDS: dict[str, Callable[[str], object]] = {
    "replicas": int,
    "replica-shares": _shares,
    "zero": int,
    "tensor": int,
    "tensor-axes": lambda text: tuple(text.split(",")),
    "tensor-shares": _shares,
    "recompute": _stages,
    "offload": lambda text: tuple(text.split(",")),
}


def _cluster(form: Form, devices: int, folder: Path) -> Cluster:
    """Return the devices, with a store each where the form offloads."""
    made, room = cluster(devices), folder / "stores"
    if not form.option("offload"):
        return made
    room.mkdir()
    stores = (DeviceStore(d.name, d.name, 2**32, 1e12, str(room)) for d in made.devices)
    return replace(made, stores=tuple(stores))


def _verify(form: Form, path: Path, folder: Path) -> Mapping[str, str]:
    from bigbrain_fx.verification.child import verify_here
    from bigbrain_fx.verification.failures import error_of

    wanted = {"bundle": str(folder / "bundle"), "model": None, "steps": 3, "processes": None}
    try:
        checks = verify_here(wanted)
    except Exception as error:
        known = error_of(error, folder / "bundle", path)
        raise known or error from error
    wrong = [c for c in checks if c["passed"] is not True]
    if not wrong:
        return {}
    if all(c.get("warns") for c in wrong):
        return {"warns": str(wrong[0]["detail"]).partition(": ")[0]}
    said = "; ".join(f"{c['name']}: {c['detail']}" for c in wrong)
    return {"status": "late" if wrong[0]["passed"] is False else "unseen", "detail": said}


def _train(form: Form, path: Path, folder: Path) -> Mapping[str, str]:
    """Train with the bundle's own programs; compare with the loop, which draws otherwise."""
    from bigbrain_fx.verification.failures import error_of
    from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle

    bundle, made = folder / "bundle", read_plan(folder / "bundle")
    if form.dice and not made.graph.is_opaque_step:
        return {}
    try:
        done = run_bundle(import_bundle(bundle), made, STEPS, seed=0)
    except Exception as error:  # later data than `verify` has seen
        raise error_of(error, bundle, path) or error from error
    losses, tensors = torch.load(folder / "loop.pt")
    ours = [float(loss) for loss in done.losses]
    off = max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, losses, strict=True))
    sums = half_sums(made.graph, made.stages), half_values(made.graph, made.stages)
    coarse = any(sums)  # split has said so
    names = list(_apart_from(tensors, done.tensors, coarse))
    if not off <= (HALF_LOSS if coarse else LOSS) or names:
        said = f"losses {off:.1e} off; {', '.join(names[:4])}"
        return {"status": "wrong", "detail": said}
    return {}


def _apart_from(
    want: Mapping[str, Tensor], have: Mapping[str, Tensor], coarse: bool = False
) -> Iterator[str]:
    for name, tensor in have.items():
        if name not in want:
            continue
        theirs = want[name].to(torch.complex128 if tensor.is_complex() else torch.float64)
        error = float((tensor.to(theirs.dtype) - theirs).abs().max()) if tensor.numel() else 0.0
        scale = float(theirs.abs().max()) if tensor.numel() else 0.0
        unit = 1e-2 if tensor.dtype in (torch.bfloat16, torch.float16) else 1e-5
        unit = _HALF if coarse else unit
        if not error <= unit * max(scale, 1e-3):
            yield f"{name} {error / (scale or 1.0):.1e} off"


def cluster(count: int = 2) -> Cluster:
    """Return unlike CPU devices whose links cost nothing: tiny models are cut, too."""
    speeds = (60e9, 30e9)
    made = (Device(f"d{i}", "h", "cpu", 2**33, speeds[i % 2], 12e9, 1e-6) for i in range(count))
    return Cluster(tuple(made), Link(1e-8, 1e12))
