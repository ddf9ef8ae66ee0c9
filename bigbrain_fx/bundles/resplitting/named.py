"""One commit of all devices of a plan as tensors and facts of the model, by name.

If several devices hold one tensor (a tied parameter, a table) their copies must be the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bigbrain_fx.emit import batch_specs
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import (
    BrokenError,
    CheckpointStore,
    CommitError,
    ImageLayout,
    Loaded,
    Record,
    TensorEntry,
    UnlikeFactsError,
    first_loadable,
    joined_facts,
    parameter_of,
    part_of_facts,
)
from bigbrain_fx.weights import CODES, read_header

SAME = ("seed", "micro_batches", "inputs", "torch", "loss_scale")


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor: in the image of one device."""

    loaded: Loaded
    entry: TensorEntry

    @property
    def data(self) -> memoryview:
        """Its bytes, mapped from the file."""
        return memoryview(self.loaded.image)[self.entry.start : self.entry.end]


@dataclass(frozen=True)
class Named:
    """State of a model at one step.

    Attributes:
        step: number of finished steps.
        files: device -> its image on the disk.
        tensors: by the names of a state ("parameter:a", "optimizer:exp_avg:a").
        facts: those that are the same for all devices.
        optimizer: class; hyperparameters; and by parameter name, which of them, scalars, strides.
    """

    step: int
    files: Mapping[str, Path]
    tensors: Mapping[str, TensorPlace]
    facts: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None

    def forget(self) -> None:
        """Let the system take back the memory of all images that were read."""
        for place in {id(p.loaded): p.loaded for p in self.tensors.values()}.values():
            place.forget()

    def find(self, name: str) -> str | None:
        """Return the state's name of a parameter or buffer, by its canonical name in the model."""
        for kind in ("parameter", "buffer"):
            if f"{kind}:{name}" in self.tensors:
                return f"{kind}:{name}"
        return None

    def facts_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the facts of a device that holds these parameters and buffers."""
        return {**self.facts, "optimizer": part_of_facts(self.optimizer, names)}

    def tensors_of(self, names: Iterable[str], updated: Collection[str]) -> dict[str, TensorPlace]:
        """Return the tensors of such a device; the optimizer's of what it updates."""
        found = {name: p for name, p in self.tensors.items() if parameter_of(name) in updated}
        for name in names:
            full = self.find(name)
            if full is not None:
                found[full] = self.tensors[full]
        return found


def read_members(
    folder: Path, columns: Sequence[Sequence[str]], expected: Mapping[str, Any]
) -> tuple[list[Named], list[str]]:
    """Read the newest commit that is whole on all devices; every byte is checked.

    Args:
        folder: of the commits.
        columns: the devices that are one rank of each tensor group, for all ranks.
        expected: what the commit must be of.

    Returns:
        A state for each column, and what the user should know of newer commits that are broken.

    Raises:
        InputError: there is none, or it is of another plan.
    """
    notes: list[str] = []
    store, loaded = CheckpointStore(folder), dict[str, Loaded]()

    def problems(record: Record) -> list[str]:
        loaded.clear()
        found = []
        without = record.about.get("without", ())  # replicas that were lost for good
        for device in (n for devices in columns for n in devices if n not in without):
            try:
                loaded[device] = store.load(record, device, expected, notes.append)
                loaded[device].forget()  # all of them together are the whole model
            except BrokenError as error:
                found.append(str(error))
        return found

    try:
        found = store.to_resume(notes.append)
        store.warn_of_others(notes.append)
        record, _ = first_loadable(found, problems, notes.append)
    except CommitError as error:
        raise InputError(
            str(error),
            code=error.code,
            at=str(folder),
            notes=tuple(notes),
            help="give another --checkpoint-dir",
        ) from error
    states = []
    for devices in columns:
        own = {name: found for name, found in loaded.items() if name in devices}
        states.append(_joined(folder, record, own))
    return states, notes


def _joined(folder: Path, record: Record, loaded: Mapping[str, Loaded]) -> Named:
    first = next(iter(loaded.values()))
    facts = {name: first.layout.facts.get(name) for name in SAME}
    tensors: dict[str, TensorPlace] = {}
    for device, found in loaded.items():
        for name in SAME:
            if found.layout.facts.get(name) != facts[name]:
                raise differs(name, device, folder / record.folder)
        for name, entry in found.layout.entries.items():
            seen = tensors.setdefault(name, TensorPlace(found, entry))
            if seen.loaded.checks[name] != found.checks[name]:
                raise differs(name, device, folder / record.folder)
    files = {name: folder / record.folder / f"{name}.safetensors" for name in loaded}
    optimizers = [found.layout.facts["optimizer"] for found in loaded.values()]
    try:
        optimizer = joined_facts(optimizers)
    except UnlikeFactsError as error:
        raise differs(str(error), "a device", folder / record.folder) from error
    return Named(record.step, files, tensors, facts, optimizer)


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    """Return the facts of a state that no run of ours has left; a loss scale begins anew."""
    return {
        "seed": plan.seed,
        "micro_batches": plan.micro_batches,
        "inputs": {name: [d, list(shape)] for name, (d, shape) in batch_specs(plan).items()},
        "torch": version("torch"),
        "loss_scale": None,
    }


def differs(what: str, device: str, where: Path) -> InputError:
    """Return the error for a commit whose devices do not have one state."""
    return InputError(
        f"{what} of {device} is not what the other devices have",
        code="BX3102",
        at=str(where),
        help="this checkpoint is no state of one model; give another --checkpoint-dir",
    )


def places_of(image: Path, step: int) -> dict[str, TensorPlace]:
    """Return where the tensors of a safetensors file are, by their names there."""
    found = read_header(image)
    entries = {n: TensorEntry(n, CODES[s.dtype], s.shape, s.start) for n, s in found.items()}
    with image.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    layout = ImageLayout(b"", entries, {}, len(data))
    loaded = Loaded(Record(step, 1, image.name, {}, {}), data, layout, {})
    return {name: TensorPlace(loaded, entry) for name, entry in entries.items()}
