"""Plan -> the text of every file of a bundle, by file name: the same plan gives the same bytes.

This module reads the model file and writes nothing: `bundle.py` puts the texts on a disk.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from bigbrain_fx.core import DTYPE_BYTES, Bucket, Edge, Stages, Statistics
from bigbrain_fx.emit.files.again import shipped_like, texts_like
from bigbrain_fx.emit.files.blocks import blocks_text
from bigbrain_fx.emit.files.channels import DeviceFile
from bigbrain_fx.emit.files.code import BLOCKS, DeviceCode, device_code, shared_blocks
from bigbrain_fx.emit.files.device import device_text
from bigbrain_fx.emit.files.infer_texts import infer_texts
from bigbrain_fx.emit.files.model_file import UsersCode, users_code
from bigbrain_fx.emit.files.opaque import OpaqueStages
from bigbrain_fx.emit.files.readme import readme_text, users_files
from bigbrain_fx.emit.files.train_texts import train_texts
from bigbrain_fx.emit.modules.classes import Classes, StageText
from bigbrain_fx.emit.modules.layout import quiet
from bigbrain_fx.plan import (
    Plan,
    answering,
    begun_at,
    early_takes,
    messages,
    norm_specs,
    part_channels,
    piece_messages,
    roots,
)
from bigbrain_fx.weights import unused_file


def stage_texts(plan: Plan) -> list[StageText]:
    """Return the text of every stage, and what its arguments and results are called."""
    classes = _classes(plan)
    return [classes[stage.member].stage_text(stage) for stage in plan.stages.stages]


def _classes(plan: Plan) -> list[Classes] | list[OpaqueStages]:
    """Return the classes of each rank of tensor groups: alike but for numbers."""
    if plan.graph.is_opaque_step:
        return [OpaqueStages(plan.graph, plan.stages.stages, plan.stages.devices)]
    found = []
    for member, graph in enumerate(plan.sharded.members):
        stages = plan.stages.of_member(member)
        results = [roots(graph, stage) for stage in stages]
        found.append(Classes(graph, stages, results, plan.stages.devices))
    return found


def bundle_texts(
    plan: Plan,
    like: Path | None = None,
    *,
    own: UsersCode | None = None,
    lean: bool = False,
    bare: bool = False,
) -> dict[str, str]:
    """Return the Python files and the README of a bundle, by file name.

    The user's code comes from the model file, which was read if there is `own`, or from `like`, a
    bundle of the same graph.
    """
    own = own or (users_code(plan) if like is None else None)
    devices = _devices_code(plan)
    shared = {} if _has_blocks(own, like) else shared_blocks(devices)
    texts = {f"{each.file.names.module}.py": device_text(each, shared) for each in devices}
    texts |= {f"{BLOCKS}.py": blocks_text(devices, shared)} if shared else {}
    if own is not None:
        texts.update(_users_texts(plan, own, lean, bare))
    elif like is not None:
        texts.update(texts_like(plan, like, bare=bare))
    for name in [name for name in texts if name.endswith(".py")]:
        ast.parse(texts[name])  # a slip of ours must not reach a disk
    return texts


def _has_blocks(own: UsersCode | None, like: Path | None) -> bool:
    """Whether a module of the user's is called as the file of shared blocks would be."""
    shipped = own.files if own is not None else shipped_like(like) if like is not None else ()
    return BLOCKS in {path.stem for path in shipped}


def _devices_code(plan: Plan) -> list[DeviceCode]:
    """Write the classes of each device."""
    classes, parts = _classes(plan), part_channels(plan)
    norms = norm_specs(plan) if plan.source.clip_norm is not None else {}
    member = {stage.device: stage.member for stage in plan.stages.stages}
    found = []
    for program in plan.programs:
        file = DeviceFile(
            plan.sharded.members[member[program.device]],
            plan.stages,
            program,
            plan.schedule,
            plan.micro_batches,
            plan.rows,
            plan.graph.name,
            plan.source.varies and plan.mode == "train",
            plan.source.module,
            parts,
            norms,
            **_store(plan, program.device),
        )
        found.append(device_code(file, classes[member[program.device]]))
    return found


def _store(plan: Plan, device: str) -> dict[str, Any]:
    """Return where a device keeps what it offloads, and how much that is."""
    nbytes = plan.forecast.of(device).stored_bytes
    return {"store": plan.cluster.store[device], "store_bytes": nbytes} if nbytes else {}


def _users_texts(plan: Plan, own: UsersCode, lean: bool, bare: bool) -> dict[str, str]:
    texts = train_texts(plan, own, lean, bare) if plan.mode == "train" else infer_texts(plan, own)
    if own.functions.text:
        verb = "copied from" if own.name.endswith(".py") else "built by transformers from"
        head = f'"""What stages call as it is, {verb} {quiet(own.name)}."""\n\n'
        texts["functions.py"] = head + own.functions.text + own.functions.ours
    return {**texts, "README.md": readme_text(plan, users_files(own), lean=lean, bare=bare)}


def weight_files(plan: Plan) -> dict[str, list[str]]:
    """Return which tensors go into which file of weights/; state that no device reads has its own.

    That one is for `export`: the whole state dict of the model comes back out of a bundle.
    """
    files = {
        f"{device}.safetensors": list(
            dict.fromkeys(p for stage in plan.stages.of(device) for p in stage.params)
        )
        for device in plan.stages.devices
    }
    param = plan.graph.param
    held = {param[name].canonical for names in files.values() for name in names}
    state = [p for p in plan.graph.params if p.kind != "constant" and p.name == p.canonical]
    unused = [p.name for p in state if p.name not in held]
    return {**files, unused_file(plan.stages.devices): unused} if unused else files


def weight_index(plan: Plan) -> dict[str, str]:
    """Return the device that answers for each trained parameter, in the order of the model."""
    return answering(plan)


def buckets_json(plan: Plan) -> str:
    """Return buckets.json: what replicas sum together and over which channels; see `runtime`."""
    stages = plan.stages
    both: list[Bucket | Statistics] = [*stages.buckets, *stages.statistics]
    dtype = {each.name: each.dtype for each in both}
    channels: dict[str, list[object]] = {each.name: [] for each in both}
    for tag, edge in _listed(plan):
        ends = edge.source, edge.target
        devices = [stages.stages[end].device for end in ends]
        elements = edge.nbytes // DTYPE_BYTES[dtype[edge.value]]
        row = (tag, edge.kind, ends, devices, elements, messages(stages, edge))
        channels[edge.value].append(row)
    gathers = _gathers(plan) if stages.gathers else {}
    lines = (
        f'"{each.name}": '
        + json.dumps(
            {
                "stages": each.stages,
                "dtype": each.dtype,
                **_said(stages, each),
                **({"devices": _devices(stages, each)} if stages.by_backend else {}),
                **gathers.get(each.name, {}),
                "channels": channels[each.name],
            }
        )
        for each in both
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _listed(plan: Plan) -> Iterator[tuple[int, Edge]]:
    """Yield the channels of buckets.json by number: those of no edge come after all others."""
    tags = {edge: tag for tag, edge in enumerate(plan.stages.edges)}
    more = count(len(tags) + len(part_channels(plan)))
    pieces = piece_messages(plan.stages)
    statistics = (edge for edge in tags if edge.kind == "statistics")
    numbered = [(tags[e] if e in tags else next(more), e) for e in (*pieces, *statistics)]
    yield from sorted(numbered, key=lambda each: each[0])


def _devices(stages: Stages, each: Bucket | Statistics) -> list[str]:
    """Return the devices of a process group, by replica."""
    return [stages.stages[stage].device for stage in each.stages]


def _gathers(plan: Plan) -> dict[str, dict[str, dict[int, object]]]:
    """Return when a bucket's weights are sent, by channel, and its gradients taken, by stage.

    That is before, and after, which of a device's computations in a step.
    """
    found: dict[str, dict[str, dict[int, object]]] = {
        bucket.name: {"sends": {}, "takes": {}} for bucket in plan.stages.buckets
    }
    tags = {edge: tag for tag, edge in enumerate(plan.stages.edges)}
    for program in plan.programs:
        for edge, begun in begun_at(program).items():
            found[edge.value]["sends"][tags[edge]] = begun
        for stage, takes in early_takes(program).items():
            for name in {name for counts in takes.values() for name in counts}:
                counts = {run: c[name] for run, c in takes.items() if c[name]}
                found[name]["takes"][stage] = counts
    return found


def _said(stages: Stages, each: Bucket | Statistics) -> dict[str, object]:
    if isinstance(each, Statistics):
        return {"buffers": each.buffers, "counters": each.counters}
    waits = [stage for stage in each.stages if stages.waits_for(each.name, stage)]
    return {"pieces": each.pieces, "marks": each.marks, "waits": waits, "params": each.params}
