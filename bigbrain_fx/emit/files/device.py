"""Stages and program of one device -> its file: classes, channels, and the schedule as code.

`classes.py` writes the computation of a stage, `instructions.py` its messages.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from bigbrain_fx.core import Backward, Stage, micro_text
from bigbrain_fx.emit.files.blocks import SEEDED
from bigbrain_fx.emit.files.channels import Channels, DeviceFile, collected
from bigbrain_fx.emit.files.code import DeviceCode
from bigbrain_fx.emit.files.imports import import_lines
from bigbrain_fx.emit.files.instructions import (
    backward_lines,
    forward_lines,
    update_lines,
    weight_lines,
)
from bigbrain_fx.emit.files.opaque import (
    BASE as OPAQUE,
    header_lines,
    step_lines,
)
from bigbrain_fx.emit.files.schedule_text import schedule_lines
from bigbrain_fx.emit.modules.classes import StageText
from bigbrain_fx.emit.modules.kept import leaf_path
from bigbrain_fx.emit.modules.layout import WIDTH, double_quoted, quiet, wrapped
from bigbrain_fx.emit.modules.names import identifier
from bigbrain_fx.emit.modules.taps import TAPPING
from bigbrain_fx.plan import holders

_DEFERRING = "# {layers}: their weights' gradients wait for weights_N"
_AGAIN = "# what again(...) gives is not kept from forward to backward: it is made again"
_GATHERED = "# weights that other replicas keep: gathered for each run of a stage, then freed"
_OVERLAP = {
    "2bw": "# a batch computes with the weights of one step before; `ahead` of the next are begun",
    "stash": "# a micro-batch computes with the weights of `ahead` updates before its own",
}
_COMPILED = "# stages run under torch.compile, with these shapes: equal to rounding"
_STATEFUL = "# these modules keep plain attributes between calls: checkpoints have them"
_RECOMPUTE = "# these keep no activations: each backward first runs the stage forward again"


def device_text(device: DeviceCode, shared: Mapping[str, str] | None = None) -> str:
    """Return the text of one device's file.

    Args:
        device: its stages and blocks.
        shared: the blocks that stand in a file of their own: name -> text.
    """
    file, own = device.file, device.stages
    channels = Channels(file, {text.stage.index: text for text in own})
    elsewhere = shared or {}
    blocks = [text for name, text in device.blocks.items() if name not in elsewhere]
    bodies = ["\n".join(("", "", *text.lines)) for text in own if text.lines]
    step = step_lines(file) if file.graph.is_opaque_step else []
    program = _device_class(file, own, channels, _tapping([*device.blocks.values(), *bodies]))
    names = ["Channel", *_bases(file), *["Stage"] * (not file.graph.is_opaque_step)]
    text = "\n".join([*blocks, *bodies, *channels.lines(), *step])
    tried = f"{file.names.module} import {own[0].name}"
    lines = [
        f'"""{_header(file, own, [*blocks, *bodies])}"""',
        "",
        *import_lines([device], text, names, tried, elsewhere),
        *blocks,
        *bodies,
        "",
        "",
        *channels.lines(),
        "",
        "",
        *program,
    ]
    return double_quoted("\n".join(lines) + "\n")


def _header(file: DeviceFile, own: Sequence[StageText], lines: Sequence[str]) -> str:
    device, title = quiet(file.program.device), quiet(file.title)
    picture = "\n".join(f"    {line}" for line in _picture(file, own[0].stage))
    numbers = ", ".join(str(text.stage.index) for text in own)
    word = "stage" if len(own) == 1 else "stages"
    copies = _copies(file) if file.stages.replicas > 1 else ""
    opaque = header_lines(file.graph.ops[0]) if file.graph.is_opaque_step else []
    why = "".join(f"{quiet(line)}\n" for line in opaque)
    if file.members:
        copies += f", TP rank {own[0].stage.member} of {file.stages.members}"
    draws = SEEDED if any("self.seeded(" in line for line in lines) else ""
    return (
        f"Device {device}: {word} {numbers} of {len(file.stages.stages)} of {title}{copies}.\n\n"
        f"{picture}\n\n"
        f"{draws}"
        f"{why}"
        "Written by bigbrain-fx; needs torch, safetensors and runtime/.\n"
    )


def _picture(file: DeviceFile, own: Stage) -> list[str]:
    """Draw the chain of devices by stage: of a V, a device stands in it once per visit."""
    chain = [name for name, _ in groupby(stage.device for stage in file.stages.beside(own))]
    names = [f"[{quiet(name)}]" if name == own.device else quiet(name) for name in chain]
    drawn = textwrap.wrap(" --> ".join(names), WIDTH - 4, break_long_words=False)
    work = f"{file.schedule}, {micro_text(file.micro_batches)} of {file.rows}"
    if len(drawn[-1]) + 6 + len(work) > WIDTH - 4:
        return [*drawn, work]
    return [*drawn[:-1], f"{drawn[-1]}      {work}"]


def _copies(file: DeviceFile) -> str:
    """Say which replica a device is part of, or which two."""
    found = file.stages.replicas_on(file.program.device)
    word = "replica" if len(found) == 1 else "replicas"
    return f", {word} {' and '.join(map(str, found))} of {file.stages.replicas}"


def _bases(file: DeviceFile) -> tuple[str, ...]:
    """Return the classes of the runtime that a device's is of."""
    return ("Stateful", _base_class(file)) if _stateful(file) else (_base_class(file),)


def _stateful(file: DeviceFile) -> dict[str, tuple[str, ...]]:
    """Return the paths of the opaque modules that keep state here, with their attributes."""
    own = file.stages.of(file.program.device)
    ops = [file.graph.op[name] for stage in own for name in stage.ops]
    return {path: op.state for op in ops if op.state and (path := leaf_path(op))}


def _base_class(file: DeviceFile) -> str:
    if file.graph.is_opaque_step:
        return OPAQUE
    if any(stage.deferred for stage in file.stages.of(file.program.device)):
        return "DeferringDevice"
    if any(stage.again for stage in file.stages.of(file.program.device)):
        return "MakingAgain"
    if file.stages.asynchronous:
        return "AsynchronousDevice"
    return "Device" if file.graph.training else "InferenceDevice"


def _tapping(lines: Sequence[str]) -> list[str]:
    """Return the layers of the runtime that classes make."""
    text = "\n".join(lines)
    return [name for name in sorted(TAPPING) if re.search(rf"(?<![\w.]){name}\(", text)]


def _device_class(
    file: DeviceFile, own: Sequence[StageText], channels: Channels, tapping: Sequence[str]
) -> list[str]:
    device = file.program.device
    work = "in one step" if file.graph.training else "with one batch"
    lines = [
        f"class {file.names.program}({', '.join(_bases(file))}):",
        f'    """What {identifier(device)} does {work}; `step_once` at the end is the schedule."""',
        "",
        *_attributes(file, own, channels, tapping),
    ]
    lines += step_lines(file) if file.graph.is_opaque_step else []
    trained = {i.stage for i in file.program.instructions if isinstance(i, Backward)}
    for text in own:
        lines += ["", *forward_lines(text, file, channels)]
        if text.stage.index in trained:
            lines += ["", *backward_lines(text, file, channels)]
            lines += ["", *weight_lines(text, file)] if text.stage.deferred else []
    if file.graph.loss is not None:
        lines += ["", *update_lines(file, channels)]
    return [*lines, "", *schedule_lines(file)]


def _attributes(
    file: DeviceFile, own: Sequence[StageText], channels: Channels, tapping: Sequence[str]
) -> list[str]:
    tied = _tied(file, own)
    aliases = {p: file.graph.param[p].canonical for text in own for p in text.stage.params}
    aliases = {name: canonical for name, canonical in aliases.items() if name != canonical}
    made = {value: (t.stage.index, name) for t in own for value, name in t.results.items()}
    loss = made.get(file.graph.loss) if file.graph.loss else None
    collects = any(collected(file.graph, file.stages, text.stage) for text in own)
    again = tuple(text.stage.index for text in own if text.stage.runs_again)
    waits = tuple(text.stage.index for text in own if text.stage.deferred)
    promises = tuple(text.stage.index for text in own if text.stage.again)
    stateful = _stateful(file)
    about = _DEFERRING.format(layers=", ".join(tapping))
    rows = [
        f"name = {file.program.device!r}",
        f"names = {file.stages.devices!r}",
        f"micro_batches = {file.micro_batches}",
        *([f"members = {file.members!r}  # parts are added in this order"] if file.members else []),
        *_replica_rows(file, own),
        f"stages = {{{', '.join(f'{text.stage.index}: {text.name}' for text in own)}}}",
        *([_RECOMPUTE, f"recompute = {again!r}"] if again else []),
        *([_AGAIN, f"makes_again = {promises!r}"] if promises else []),
        *([about, f"deferring = {waits!r}"] if waits else []),
        *([f"loss = {loss!r}"] if loss else []),
        *([f"outputs = {dict(file.graph.output_dims)!r}"] if collects else []),
        f"channels = {_names_tuple(channels.all_names())}",
        *([f"tied = {tied!r}"] if tied else []),
        *([_STATEFUL, f"stateful = {stateful!r}"] if stateful else []),
        *([f"aliases = {aliases!r}"] if aliases else []),
        *_store_rows(file),
        *_overlap_rows(file),
        *([_COMPILED, "compiled = True"] if file.stages.compiled else []),
    ]
    return [line for row in rows for line in wrapped(row, 4)]


def _tied(file: DeviceFile, own: Sequence[StageText]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold a device's tied parameters: of the first replica that it has."""
    found: dict[str, tuple[int, ...]] = {}
    for replica in file.stages.replicas_on(file.program.device):
        stages = [text.stage for text in own if text.stage.replica == replica]
        mine = {file.graph.param[name].canonical for stage in stages for name in stage.params}
        held = holders(file.graph, file.stages.beside(stages[0]))
        mine -= found.keys()
        found |= {n: tuple(s.index for s in at) for n, at in held.items() if n in mine}
    return {name: at for name, at in found.items() if len(at) > 1}


def _store_rows(file: DeviceFile) -> list[str]:
    """Say what the device keeps in its store, and where that is."""
    store = file.store
    if store is None:
        return []
    own = {stage.index for stage in file.stages.of(file.program.device)}
    saving = tuple(sorted(own & file.stages.saving.keys()))
    said = {"state": "what the optimizer keeps, but while it updates"}
    again = bool(own & set(file.stages.recompute))
    saved = "what stages received" if again else "what forwards save"
    said |= {"activations": f"{saved}, until their backward"} if saving else {}
    what = "; ".join(said[word] for word in file.stages.offload if word in said)
    if "weights" in file.stages.offload:
        what = "all of the stages that do not run: weights, gradients, state, what they received"
    return [
        *(f"# {line}" for line in textwrap.wrap(f"{quiet(store.name)} has {what}", WIDTH - 6)),
        f"offload = {file.stages.offload!r}",
        *([f"saving = {saving!r}"] if saving else []),
        *([f"store = {store.folder!r}"] if store.folder else []),
        f"store_bytes = {file.store_bytes}",
    ]


def _overlap_rows(file: DeviceFile) -> list[str]:
    """Say how far a step runs into the next batch."""
    stages = file.stages
    if not stages.asynchronous:
        return []
    own = stages.of(file.program.device)[0].index
    return [
        _OVERLAP[stages.asynchronous],
        f"asynchronous = {stages.asynchronous!r}",
        f"ahead = {stages.ahead(own)}",
    ]


def _replica_rows(file: DeviceFile, own: Sequence[StageText]) -> list[str]:
    """Say which of the step's micro-batches each replica has, and how gradients are summed."""
    stages = file.stages
    if not stages.micros:
        return []
    return [
        f"micros = {_names_tuple(map(_numbers, stages.micros))}",
        f"replica = {own[0].stage.replica}",
        *_replica_of_stage(file, own),
        *([f"sum_order = {stages.sum_order!r}"] if stages.sum_order != "replica" else []),
        *([_GATHERED] if stages.gathers else []),
        *([f"zero_stage = {stages.zero_stage}"] if stages.zero_stage else []),
    ]


def _replica_of_stage(file: DeviceFile, own: Sequence[StageText]) -> list[str]:
    """Say which replica a stage is part of, where a device has stages of two."""
    if len(file.stages.replicas_on(file.program.device)) == 1:
        return []
    of = {text.stage.index: text.stage.replica for text in own}
    return [f"replica_of_stage = {of!r}"]


def _numbers(micros: Sequence[int]) -> str:
    """Write ascending numbers, as a range where they are one."""
    step = micros[1] - micros[0] if len(micros) > 1 else 1
    found = range(micros[0], micros[-1] + 1, step)
    return repr(found if len(micros) > 2 and tuple(found) == tuple(micros) else tuple(micros))


def _names_tuple(names: Iterable[str]) -> str:
    listed = list(names)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"
