"""Placement by hand: modules pinned to devices, and a file that places all modules.

    --pin 'blocks.0-1=d0'      these modules there; the partitioner places the rest
    --place placement.json     all of them, as `explain --placement` wrote it and the user edited it

A module is named by its path; "blocks.0-5" are six of them. Inner modules go along, except where a
longer path says otherwise. The module reads and writes names; it does not know costs.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bigbrain_fx.core import Cluster, Graph, Op, Param, Placement, once
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.weights import replace_file

_HOW = "`explain BUNDLE --placement FILE` writes one"
Pins = Sequence[tuple[str, str]]  # modules, device


def read_pins(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Read "blocks.0-5=d0".

    Raises:
        InputError: it is none.
    """
    found = []
    for text in texts:
        modules, equals, device = text.partition("=")
        if not (modules.strip() and equals and device.strip()):
            raise InputError(
                f"expected MODULES=DEVICE, found {text!r}",
                code="BX1211",
                at="--pin",
                help="--pin blocks.0-1=d0",
            )
        found.append((modules.strip(), device.strip()))
    return tuple(found)


def require_placeable(options: Options, cluster: Cluster) -> None:
    """Refuse what is wrong whatever the model is, before it is captured."""
    for _, device in options.pins:
        _require_device(device, cluster, "--pin")
    if options.place:
        path = Path(options.place)
        found = _file(path)
        for key, homes in (("modules", found.modules), ("ops", found.ops)):
            for name, device in homes.items():
                _require_device(device, cluster, f"{path}: {key}.{name}")


def _require_device(name: str, cluster: Cluster, at: str) -> None:
    if name not in cluster.device:
        raise _unknown("device", name, tuple(cluster.device), at)


def homes_of(graph: Graph, cluster: Cluster, pins: Pins, at: str = "--pin") -> dict[str, str]:
    """Return the device of every op that pins speak of.

    Raises:
        InputError: there is no such module or device (the nearest are named), or two pins disagree.
    """
    known = _modules(graph)
    said: dict[str, str] = {}
    for modules, device in pins:
        _require_device(device, cluster, at)
        for path in named_paths(modules, known, at):
            if said.setdefault(path, device) != device:
                raise InputError(
                    f"{path} is to be on {said[path]} and on {device}",
                    code="BX1213",
                    at=at,
                    help="say one of them",
                )
    found = {}
    for op in graph.ops:
        inner = [path for path in _upwards(op.module_path) if path in said]
        if inner:
            found[op.name] = said[inner[0]]
    return found


def with_homes(placement: Placement, homes: Mapping[str, str]) -> Placement:
    """Return a placement with some ops where the user wants them."""
    pinned = f"{placement.reason}; {len(homes)} ops pinned by hand".removeprefix("; ")
    return replace(placement, device_of={**placement.device_of, **homes}, reason=pinned)


def filled(graph: Graph, homes: Mapping[str, str], reason: str) -> Placement:
    """Place all ops, the unnamed ones with the latest of the ops that they read.

    An op that reads nothing placed goes with the first op that reads it.
    """
    order = {op.name: place for place, op in enumerate(graph.ops)}
    found: dict[str, str] = {}
    for op in graph.ops:
        before = [ref for ref in op.refs if ref in found]
        if op.name in homes:
            found[op.name] = homes[op.name]
        elif before:
            found[op.name] = found[max(before, key=order.__getitem__)]
    first = next(iter(homes.values()))
    for op in reversed(graph.ops):
        readers = [name for name in graph.consumers[op.name] if name in found]
        home = found[min(readers, key=order.__getitem__)] if readers else first
        found.setdefault(op.name, home)
    return Placement({op.name: found[op.name] for op in graph.ops}, reason)


# --------------------------------------------------------------------------- the file


def write_placement(plan: Plan, path: str | Path, force: bool = False) -> None:
    """Write where a plan computes what, for an editor and for `--place`.

    Raises:
        InputError: the file is there, or it cannot be written.
    """
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise InputError(
            f"{path} exists already", code="BX1215", help="give another file, or --force"
        )
    text = json.dumps(placement_json(plan), indent=2) + "\n"
    with os_error_as(f"cannot write {path}", code="BX1216", help="give a file that can be written"):
        replace_file(path, text.encode())


def placement_json(plan: Plan) -> dict[str, Any]:
    """Return what the file holds: whole modules where they are on one device, else single ops.

    A tensor group is where its first device is; of replicas it is the first.
    """
    own_stages = [stage for stage in plan.stages.of_member(0) if stage.replica == 0]
    device_of: dict[str, str] = {}
    for stage in own_stages:
        own = set(stage.ops) - set(stage.recomputed)  # what it only computes again is another's
        device_of |= dict.fromkeys(own, stage.device)
    for stage in own_stages:  # what every reader makes for itself has no owner
        for name in stage.recomputed:
            device_of.setdefault(name, stage.device)
    held: dict[str, set[str]] = {}
    for op in plan.graph.ops:
        for path in _upwards(op.module_path):
            held.setdefault(path, set()).add(device_of[op.name])
    modules: dict[str, str] = {}
    ops: dict[str, str] = {}
    for op in plan.graph.ops:
        whole = [path for path in _upwards(op.module_path) if len(held[path]) == 1]
        if whole:
            modules[whole[-1]] = device_of[op.name]
        else:
            ops[op.name] = device_of[op.name]
    return {
        "format": 1,
        "$comment": "Modules by path ('blocks.0-5' are six), then single ops that are in no "
        "module, or in one that is cut; give it to split --place.",
        "model": plan.graph.name,
        "devices": list(dict.fromkeys(stage.device for stage in own_stages)),
        "modules": modules,
        "ops": ops,
    }


def read_placement(path: str | Path, graph: Graph, cluster: Cluster) -> Placement:
    """Read such a file; ops of which it says nothing go with what they read.

    Raises:
        InputError: it is none, of another format, or names what is not there.
    """
    path = Path(path)
    found = _file(path)
    if found.model not in (None, graph.name):
        raise InputError(
            f"it is a placement of model {found.model!r}, and this is {graph.name!r}",
            code="BX1217",
            at=str(path),
            help='remove its line "model" if it is meant for this one, too',
        )
    homes = homes_of(graph, cluster, tuple(found.modules.items()), f"{path}: modules")
    known = {op.name for op in graph.ops}
    for name, device in found.ops.items():
        if name not in known:
            raise _unknown("op", name, tuple(known), f"{path}: ops")
        _require_device(device, cluster, f"{path}: ops.{name}")
        homes[name] = device
    if not homes:
        raise InputError(f"{path} places nothing", code="BX1218", help=_HOW)
    return filled(graph, homes, f"placed by hand, {path.name}")


class _File(BaseModel):
    """A placement file; what it says besides is for people."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal[1]
    comment: object = Field(None, alias="$comment")
    model: str | None = None
    devices: object = None
    modules: dict[str, str] = {}
    ops: dict[str, str] = {}


def _file(path: Path) -> _File:
    try:
        return _File.model_validate(json.loads(path.read_bytes(), object_pairs_hook=once))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", code="BX1219", help=_HOW
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"no placement: {first['msg']}", code="BX1222", at=f"{path}: {where}", help=_HOW
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is no JSON: {error}", code="BX1220", help="mend it, or write it anew"
        ) from error


# --------------------------------------------------------------------------- names


def _upwards(path: str) -> list[str]:
    """Return a module's path and those around it, the innermost first; of no module nothing."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _modules(graph: Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p for op in graph.ops for p in reversed(_upwards(op.module_path))))


def named_paths(modules: str, known: Sequence[str], at: str) -> list[str]:
    """Return the paths that "blocks.0-5" stands for; a module of that very name comes first.

    Raises:
        InputError: one of them is not known; says which are near.
    """
    head, dot, last = modules.rpartition(".")
    first, dash, end = last.partition("-")
    if modules in known or not (dash and first.isdecimal() and end.isdecimal()):
        found = [modules]
    else:
        found = [f"{head}{dot}{number}" for number in range(int(first), int(end) + 1)]
        if not found:
            raise InputError(
                f"{modules} are no modules: {first} is above {end}",
                code="BX1225",
                at=at,
                help=f"{head}{dot}{end}-{first}",
            )
    for path in found:
        if path not in known:
            raise _unknown("module", path, known, at)
    return found


def _unknown(kind: str, name: str, known: Sequence[str], at: str) -> InputError:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    beside = [path for path in known if "." not in path]
    listed = ", ".join(close or beside[:12] or known[:12])
    return InputError(
        f"there is no {kind} '{name}'",
        code="BX1226",
        at=at,
        help=f"did you mean {listed}?" if close else f"there are {listed}",
    )


# ------------------------------------------------------------------------------------------------
# A graph some of whose modules train no more: what only they have led to wants no gradient either.
#
# What comes out is the graph that capture gives of the model with `requires_grad_(False)` on them,
# so that a cut leaves their backward passes, gradients and optimizer state out.


def with_frozen(graph: Graph, modules: Sequence[str], at: str = "--freeze") -> Graph:
    """Return a graph whose parameters in some modules are frozen; a tied one under all its names.

    Args:
        graph: of a training.
        modules: their names, as "blocks.0-5"; also names of parameters.
        at: what the user has typed.

    Raises:
        InputError: there is no such module, it trains nothing, or nothing is left to train.
    """
    trained = [p for p in graph.params if p.is_trained]
    chosen: set[str] = set()
    for name in modules:
        found = _inside(name, graph, trained, at)
        if not found:
            raise InputError(
                f"nothing of '{name}' is trained",
                code="BX1236",
                at=at,
                help="leave it out: it is frozen already",
            )
        chosen |= found
    if chosen == {p.canonical for p in trained}:
        raise InputError(
            "nothing is left to train",
            code="BX1237",
            at=at,
            help="leave a module out that is to be trained",
        )
    params = tuple(_frozen(p) if p.canonical in chosen else p for p in graph.params)
    made = replace(graph, params=params, ops=_regraded(graph, chosen))
    if made.loss is not None and not made.op[made.loss].requires_grad:
        raise InputError(
            "the loss has no gradient then: what is left to train does not reach it",
            code="BX1238",
            at=at,
            help="leave a module out that the loss is made of",
        )
    return made


def _inside(name: str, graph: Graph, trained: Sequence[Param], at: str) -> set[str]:
    own = [p.name for p in graph.params if p.kind == "parameter"]
    known = tuple(dict.fromkeys(path for full in own for path in (*_around(full), full)))
    paths = named_paths(name, known, at)
    return {p.canonical for p in trained for path in paths if f"{p.name}.".startswith(f"{path}.")}


def _around(full: str) -> Iterable[str]:
    parts = full.split(".")[:-1]
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _frozen(param: Param) -> Param:
    return replace(param, spec=replace(param.spec, requires_grad=False))


def _regraded(graph: Graph, chosen: Collection[str]) -> tuple[Op, ...]:
    """Return the ops; those that only frozen parameters gave a gradient have none.

    Of a value that is written into, and of its views, all keep one when one of them does.
    """
    gone = {p.name for p in graph.params if p.canonical in chosen}
    wants = {p.name for p in graph.params if p.spec.requires_grad} - gone
    wants |= {entry.name for entry in graph.inputs if entry.spec.requires_grad}
    root = _roots(graph.ops)
    before = -1
    while before < len(wants):  # a later write may give a gradient to what was made earlier
        before = len(wants)
        for op in graph.ops:
            if op.requires_grad and _is_given(op, wants, gone, graph):
                wants |= {op.name, *(root.get(name, name) for name in op.mutates)}
            if root[op.name] in wants and op.requires_grad:
                wants.add(op.name)
    return tuple(op if op.name in wants or not op.requires_grad else _flat(op) for op in graph.ops)


def _is_given(op: Op, wants: Collection[str], gone: Collection[str], graph: Graph) -> bool:
    """Whether an op still has a gradient: through what it reads, or as it made one by itself."""
    reads = (*op.refs, *op.params)
    if any(name in wants for name in reads):
        return True
    had = any(name in gone or (name in graph.op and graph.op[name].requires_grad) for name in reads)
    return not had


def _roots(ops: Iterable[Op]) -> dict[str, str]:
    root: dict[str, str] = {}
    for op in ops:
        root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name
    return root


def _flat(op: Op) -> Op:
    outputs = tuple(replace(spec, requires_grad=False) for spec in op.outputs)
    return replace(op, outputs=outputs)
