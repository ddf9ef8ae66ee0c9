"""A bundle's batches, read more than once in one process: each reading must give the same.

The reference reads them, and so does each device after it. What lies outside `batches` (a generator
at module level, an iterator) goes on from one reading to the next, though in a run each process has
its own. This file knows no plans.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from bigbrain_fx.frontend import seeded
from bigbrain_fx.verification.plain_batches import Path_, tensors_of

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
    refused: Callable[..., Exception] = importlib.import_module("runtime.data").BatchError
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
