"""A bundle as any user has it: its train.py imported, its weights and batches read, trained here.

It runs on its own copy of the runtime; what it must be equal to stands elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.core import ROW_COUNTS
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import seeded
from bigbrain_fx.plan import Plan, turned_weights
from bigbrain_fx.runtime import WeightsError
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.members import (
    joined_weights,
)
from bigbrain_fx.verification.plain_batches import Path_, tensors_of
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import Scratch

if TYPE_CHECKING:  # what runs is the bundle's own copy
    from bigbrain_fx.runtime import Device, Stream


def import_bundle(folder: Path) -> ModuleType:
    """Import the bundle's train.py, or infer.py, with its own runtime."""
    _forget_others(folder)
    sys.path.insert(0, str(folder.resolve()))
    entry = "train" if (folder / "train.py").is_file() else "infer"
    return read_alike(importlib.import_module(entry))


def _forget_others(folder: Path) -> None:
    """Forget modules of the user's that have names of the bundle's own: train, data, runtime."""
    own = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] in own and not file.startswith(f"{folder.resolve()}{os.sep}"):
            del sys.modules[name]


def weights_of(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Read a bundle's weights, under every name of the model that the plan knows.

    Each in memory of its own, as modules have them: kernels round by where a tensor starts, and in
    a file it may start anywhere. They round by strides, too: those are the devices'.
    """
    found: dict[str, Tensor] = {}
    try:
        for name, tensor in joined_weights(folder / "weights", plan).items():
            found[name] = tensor.clone()
    except WeightsError as error:
        raise InputError(str(error), code=error.code, at=str(folder / "weights")) from error
    for param in plan.graph.params:  # a tied name that no stage uses has its twin's weights
        if param.canonical in found or param.name in found:
            twin = found.get(param.name, found.get(param.canonical))
            assert twin is not None
            found.setdefault(param.canonical, twin)
            found.setdefault(param.name, twin)
    for param in plan.graph.params:
        shape, dtype = [int(dim) for dim in param.spec.shape], getattr(torch, param.spec.dtype)
        found.setdefault(param.name, torch.zeros(shape))  # nothing reads it
        found[param.name] = found[param.name].to(dtype)  # a checkpoint may have another type
    return _turned(found, plan)


def _turned(found: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Return the weights as their devices lay them; names that share memory go on sharing it."""
    names = turned_weights(plan.stages, plan.sharded.members)
    for name in names:
        tensor = found[name]
        turned = laid_tensors.laid(tensor, [int(s) for s in plan.graph.param[name].spec.strides])
        found |= {twin: turned for twin, held in found.items() if held is tensor}
    return found


def batches_of(bundle: ModuleType, plan: Plan) -> Callable[[int], list[Mapping[str, Tensor]]]:
    """Return step -> its micro-batches, from a new data stream of an imported bundle."""
    made = _new_stream(bundle, plan)

    def micro_batches(step: int) -> list[Mapping[str, Tensor]]:
        made.advance(step)
        sizes = getattr(made, "sizes", ()) or (1,) * plan.micro_batches  # a lean one has none
        counted = [m for m, rows in enumerate(sizes) if rows]
        return [_inputs_of(made, m) for m in counted]

    return micro_batches


def _inputs_of(stream: Stream, micro: int) -> Mapping[str, Tensor]:
    """Return a micro-batch's inputs, and the count by which it weighs where the bundle counts."""
    found = {name: stream.get(name, micro).clone() for name in stream.inputs}
    splitting = getattr(stream, "splitting", None)  # a bundle has one only where it says something
    if splitting is not None and splitting.weigh is not None:
        found[ROW_COUNTS] = torch.tensor([stream.weights[micro]], dtype=torch.float64)
    return found


def _new_stream(bundle: ModuleType, plan: Plan) -> Stream:
    b, kind = bundle.BUNDLE, _stream_type()
    about = (
        b.batches,
        plan.seed,
        b.inputs,
        b.whole,
        plan.micro_batches,
        torch.device("cpu"),
        b.specs,
    )
    made: Stream = kind(*about) if b.splitting is None else b.splitting.stream(kind, *about)
    return made


def _stream_type() -> Any:  # noqa: ANN401  # a class of the bundle's own
    """Return what reads batches in the bundle's own runtime; a plain lean one checks little."""
    if _has_checks():
        return importlib.import_module("runtime.data").Stream
    return importlib.import_module("runtime.compared_stream").ComparedStream


def _has_checks() -> bool:
    return importlib.util.find_spec("runtime.data") is not None


def run_bundle(bundle: ModuleType, plan: Plan, steps: int, seed: int) -> Trace:
    """Train an imported bundle, all devices in this process."""
    trace = Trace()
    losses: dict[int, Tensor] = {}

    def after_step(device: Device, step: int) -> None:
        if step == 0:
            found = device.first_gradients or {}
            trace.take(trace.gradients, {name: g.clone() for name, g in found.items()})

    def report(step: int, loss: float, _: float) -> None:
        losses[step] = torch.tensor(loss, dtype=torch.float64)

    runtime = importlib.import_module("runtime.train")
    with Scratch("store") as store:  # the planned ones may be on other machines
        offloads = any(getattr(device, "offload", ()) for device in bundle.BUNDLE.devices)
        told = replace(bundle.BUNDLE, store=store) if offloads else bundle.BUNDLE
        run = runtime.run_in_process
        takes = "on_nan" in inspect.signature(run).parameters  # an older bundle goes on by itself
        more = {"on_nan": "ignore"} if takes else {}
        devices = run(told, steps, seed, report, after_step, **more)
    trace.losses.extend(losses[step] for step in sorted(losses))
    for device in devices.values():
        trace.take(trace.tensors, device.state())
    return trace


def trace_of_processes(losses: Sequence[float], gradients: Path, tensors: Path) -> Trace:
    """Read what the processes of a real run left: losses by step, two folders of safetensors."""
    trace = Trace(losses=[torch.tensor(loss, dtype=torch.float64) for loss in losses])
    for path in sorted(gradients.glob("*.safetensors")):
        trace.take(trace.gradients, load_file(path))
    for path in sorted(tensors.glob("*.safetensors")):
        trace.take(trace.tensors, load_file(path))
    return trace


OTHER = "is another one when batches(seed) is called again in one process"


def read_alike(bundle: ModuleType) -> ModuleType:
    """Let an imported bundle refuse a batch that an earlier reading has seen otherwise.

    But for one that runs the user's own step: what that leaves, its data may read.
    """
    devices = bundle.BUNDLE.devices if hasattr(bundle, "BUNDLE") else ()
    if any(getattr(device, "is_opaque", False) for device in devices):
        return bundle
    for name in ("BUNDLE", "INFERENCE"):
        if hasattr(bundle, name):
            about = getattr(bundle, name)
            setattr(bundle, name, replace(about, batches=_Alike(seeded(about.batches))))
    return bundle


class _Alike:
    """`batches` of a bundle; every call of it must give what the first one gave."""

    def __init__(self, batches: Callable[..., Iterable[object]]) -> None:
        self.batches = batches
        self.seen: dict[tuple[int, int], dict[str, str]] = {}
        functools.update_wrapper(self, batches)  # a stream asks whether there is a `start`

    def __call__(self, seed: int, start: int = 0) -> Iterator[object]:
        more = {"start": start} if start else {}
        for step, batch in enumerate(self.batches(seed, **more), start):
            self._require_same(step, batch, self.seen.setdefault((seed, step), _sums(batch)))
            yield batch

    def _require_same(self, step: int, batch: object, first: dict[str, str]) -> None:
        own = _sums(batch)
        wrong = next((name for name in {**first, **own} if own.get(name) != first.get(name)), None)
        if wrong is not None:
            raise _batch_error()(f"batch {step} (entry {wrong}) {OTHER}", code="BX3817")


def _batch_error() -> Callable[..., Exception]:
    """Return the class that the bundle's own runtime refuses batches with."""
    home = "runtime.data" if _has_checks() else "runtime.stream"
    refused: Callable[..., Exception] = importlib.import_module(home).BatchError
    return refused


def _sums(batch: object) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(tensor: Tensor, path: Path_) -> Tensor:
        found[".".join(map(str, path))] = f"{tuple(tensor.shape)} {_digest(tensor)}"
        return tensor

    tensors_of(batch, note)
    return found


def _digest(tensor: Tensor) -> str:
    own = tensor.detach().cpu().resolve_conj().resolve_neg()
    own = own.contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(own.numpy().tobytes(), digest_size=16).hexdigest()
