"""Plan -> the text of every file of a bundle, by file name: the same plan gives the same bytes.

This room reads the model file and writes nothing: `bundle.py` puts the texts on a disk.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigbrain_fx.core import Dim, Input, Stage
from bigbrain_fx.cut import owners, roots
from bigbrain_fx.emit.classes import Classes
from bigbrain_fx.emit.device import DeviceFile, device_text, opaque_targets
from bigbrain_fx.emit.expressions import function_place
from bigbrain_fx.emit.layout import double_quoted, wrapped
from bigbrain_fx.emit.names import Names
from bigbrain_fx.emit.slicing import Slice, slice_file
from bigbrain_fx.plan import Plan

EMPTY = Slice("", ())


def bundle_texts(plan: Plan) -> dict[str, str]:
    """Return the Python files and the README of a bundle, by file name."""
    classes = Classes(
        plan.graph, plan.stages.stages, [roots(plan.graph, s) for s in plan.stages.stages]
    )
    texts = {
        f"device_{number}.py": device_text(
            DeviceFile(
                plan.graph,
                plan.stages,
                program,
                plan.schedule,
                plan.micro_batches,
                plan.rows,
                plan.graph.name,
                plan.source.module,
            ),
            classes,
        )
        for number, program in enumerate(plan.programs)
    }
    functions = functions_slice(plan)
    if functions.text:
        head = f'"""Custom autograd functions, copied from {_quiet(source_file(plan).name)}."""\n\n'
        texts["functions.py"] = head + functions.text
    taken = training_slice(plan)
    constants = _constants(taken)
    texts["training.py"] = _training_text(plan, taken, constants)
    texts["train.py"] = _train_text(plan, constants)
    texts["README.md"] = _readme(plan, taken)
    for name in [name for name in texts if name.endswith(".py")]:
        ast.parse(texts[name])  # a slip of ours must not reach a disk
    return texts


def weight_files(plan: Plan) -> dict[str, list[str]]:
    """Return which tensors go into which file of weights/."""
    return {
        f"{device}.safetensors": list(
            dict.fromkeys(p for stage in plan.stages.of(device) for p in stage.params)
        )
        for device in plan.stages.devices
    }


def weight_index(plan: Plan) -> dict[str, str]:
    """Return the device that answers for each trained parameter, in the order of the model."""
    owned = owners(plan.graph, plan.stages.stages)
    owner = {name: device for device, names in owned.items() for name in names}
    return {p.name: owner[p.name] for p in plan.graph.params if p.name in owner}


def source_file(plan: Plan) -> Path:
    """Return the model file, without the name of the model in it."""
    path, _, name = plan.source.path.rpartition(":")
    return Path(path if path and name.isidentifier() else plan.source.path)


def training_slice(plan: Plan) -> Slice:
    """Return what the bundle takes from the model file."""
    source = plan.source
    named = {
        "batches": source.has_batches,
        "optimizer": source.has_optimizer,
        "lr_scale": source.has_lr_scale,
    }
    wanted = [name for name, is_there in named.items() if is_there]
    return slice_file(source_file(plan), wanted) if wanted else EMPTY


def functions_slice(plan: Plan) -> Slice:
    """Return the user's own autograd.Functions: they are called as they are, backward included."""
    targets = opaque_targets(plan.graph, [op.name for op in plan.graph.ops])
    places = [function_place(target) for target in targets]
    own = [name.partition(".")[0] for module, name in places if module == plan.source.module]
    names = list(dict.fromkeys(own))
    return slice_file(source_file(plan), names) if names and plan.source.path else EMPTY


def _constants(taken: Slice) -> dict[str, str]:
    """Return the names of our own constants in training.py; the user's code may have the same."""
    nodes = list(ast.walk(ast.parse(taken.text)))
    names = Names(node.id for node in nodes if isinstance(node, ast.Name))
    ours = ("INPUTS", "SPECS", "WHOLE", "OPTIMIZER", "LR_SCALE", "CLIP_NORM")
    return {name: names.fresh(name) for name in ours}


def _training_text(plan: Plan, taken: Slice, constants: Mapping[str, str]) -> str:
    source, name = plan.source, source_file(plan).name
    runtime = [] if source.has_optimizer else ["adamw"]
    runtime += [] if source.has_batches else ["example_batches"]
    title, origin = _quiet(plan.graph.name), _quiet(name)
    lines = [f'"""How {title} is trained; the functions are copied from {origin}."""', ""]
    text = taken.text
    if text.startswith("from __future__"):
        first, _, text = text.partition("\n")
        lines.append(first)
    if not source.has_batches:
        lines.append("from pathlib import Path")
    if runtime:
        lines += ["", f"from runtime import {', '.join(runtime)}"]
    lines += ["", text.strip("\n"), ""] if text.strip() else [""]
    copied = len(lines)
    if not source.has_batches:
        lines += [
            "",
            "def batches(seed):",
            '    """The model file has no `batches`: take its example batch again and again."""',
            '    return example_batches(Path(__file__).parent / "example.safetensors")',
            "",
        ]
    lines += ["", *_inputs(plan, constants)]
    optimizer = "optimizer" if source.has_optimizer else "adamw"
    lines.append(f"{constants['OPTIMIZER']} = {optimizer}")
    lines.append(f"{constants['LR_SCALE']} = {'lr_scale' if source.has_lr_scale else None}")
    lines.append(f"{constants['CLIP_NORM']} = {source.clip_norm!r}")
    ours = double_quoted("\n".join(lines[copied:])).splitlines()
    return "\n".join(_no_triple_blanks([*lines[:copied], *ours])) + "\n"


def _inputs(plan: Plan, constants: Mapping[str, str]) -> list[str]:
    """Write where each model input is in a batch, what it is, and which are not split."""
    used = {name for stage in plan.stages.stages for name in stage.inputs}
    entries = [entry for entry in plan.graph.inputs if entry.name in used]
    rows = [
        f"    {entry.name!r}: {entry.key if plan.source.has_batches else (entry.name,)!r},"
        for entry in entries
    ]
    whole = tuple(entry.name for entry in entries if not entry.batched)
    specs = [
        f"    {entry.name!r}: {(entry.spec.dtype, _shape(entry, plan))!r}," for entry in entries
    ]
    return [
        f"{constants['INPUTS']} = {{",
        *rows,
        "}",
        f"{constants['SPECS']} = {{",
        *specs,
        "}",
        *wrapped(f"{constants['WHOLE']} = {whole!r}", 0),
    ]


def _shape(entry: Input, plan: Plan) -> tuple[Dim, ...]:
    """Return the shape of an entry in a whole batch."""
    return entry.spec.at(plan.micro_batches * plan.rows if entry.batched else plan.rows).shape


def _train_text(plan: Plan, constants: Mapping[str, str]) -> str:
    count = len(plan.stages.devices)
    modules = [f"device_{number}" for number in range(count)]
    how = [f"training.{constants[name]}" for name in ("OPTIMIZER", "LR_SCALE", "CLIP_NORM")]
    devices = [plan.cluster.device[name] for name in plan.stages.devices]
    fields = [
        "folder=Path(__file__).resolve().parent",
        f"plan={plan.key!r}",
        f"devices=({''.join(f'device_{i}.Device{i}, ' for i in range(count)).strip()})",
        f"kinds={tuple(d.kind for d in devices)!r}",
        f"threads={tuple(d.threads for d in devices)!r}",
        f"seed={plan.seed}",
        "batches=training.batches",
        f"inputs=training.{constants['INPUTS']}",
        f"whole=training.{constants['WHOLE']}",
        f"training=Training({', '.join(how)})",
        f"specs=training.{constants['SPECS']}",
    ]
    lines = [
        f'"""Train {_quiet(plan.graph.name)}: one process per device.',
        "",
        *(f"    {line}" for line in _commands(plan)),
        '"""',
        "",
        "from pathlib import Path",
        "",
        *(f"import {module}" for module in modules),
        "import training",
        "from runtime import Bundle, Training, main",
        "",
        "BUNDLE = Bundle(",
        *(line for entry in fields for line in wrapped(f"{entry},", 4)),
        ")",
        "",
        'if __name__ == "__main__":',
        "    main(BUNDLE)",
    ]
    return double_quoted("\n".join(lines) + "\n")


def _commands(plan: Plan) -> list[str]:
    torchrun = f"torchrun --nproc-per-node {len(plan.stages.devices)} train.py --steps 100"
    explained = {
        "bigbrain-fx run . --steps 100": "all devices on this host",
        torchrun: "the same without bigbrain-fx",
        "python train.py --in-process --steps 2": "all devices in one process, for pdb",
    }
    return [f"{command:<57}# {what}" for command, what in explained.items()]


def _readme(plan: Plan, taken: Slice) -> str:
    rows = [_readme_row(plan, device) for device in plan.stages.devices]
    hosts = {plan.cluster.device[name].host for name in plan.stages.devices}
    lines = [
        f"# {plan.graph.name} on {len(plan.stages.devices)} devices",
        "",
        "Written by bigbrain-fx. It needs torch and safetensors, and nothing of bigbrain-fx: "
        "read it, change it, keep it.",
        "",
        "```",
        *_commands(plan),
        "```",
        "",
        *(_host_commands(plan) if len(hosts) > 1 else []),
        f"Schedule {plan.schedule}, {plan.micro_batches} micro-batches of {plan.rows} rows, "
        f"seed {plan.seed}.",
        "",
        "| device | host | stages | parameters and buffers | forecast busy | forecast peak |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *_readme_files(plan, taken),
        "",
        "Messages are not encrypted or authenticated: use a trusted network.",
    ]
    return "\n".join(lines) + "\n"


def _readme_files(plan: Plan, taken: Slice) -> list[str]:
    functions = functions_slice(plan)
    lines = [
        "- `device_N.py`: the classes of a device's stages, with the parameter names of the model, "
        "and its step",
        "- `training.py`: data, optimizer; `train.py`: the entry point; "
        "`runtime/`: messages and bookkeeping",
        "- `weights/`: one safetensors file per device; `plan.json`; `report.html`; "
        "`timeline.json` (open it in Perfetto)",
    ]
    if functions.text:
        lines.append("- `functions.py`: custom autograd functions, copied from the model file")
    files = dict.fromkeys((*taken.files, *functions.files))
    return [*lines, *(f"- `{path.name}`: copied from beside the model file" for path in files)]


def _readme_row(plan: Plan, device: str) -> str:
    stages: Sequence[Stage] = plan.stages.of(device)
    numbers = ", ".join(str(stage.index) for stage in stages)
    tensors = len({name for stage in stages for name in stage.params})
    entry = plan.forecast.of(device)
    host = plan.cluster.device[device].host
    peak = f"{entry.peak_bytes / 2**20:.0f} MiB"
    return f"| {device} | {host} | {numbers} | {tensors} | {entry.busy_s:.3f} s | {peak} |"


def _host_commands(plan: Plan) -> list[str]:
    lines = ["One command per host (put the first host's address for ADDRESS):", "", "```"]
    world = len(plan.stages.devices)
    for rank, name in enumerate(plan.stages.devices):
        host = plan.cluster.device[name].host
        setting = f"RANK={rank} WORLD_SIZE={world} MASTER_ADDR=ADDRESS MASTER_PORT=29500"
        lines.append(f"{host}$ {setting} python train.py --steps 100")
    return [*lines, "```", ""]


def _no_triple_blanks(lines: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for line in "\n".join(lines).splitlines():
        if line or kept[-2:] != ["", ""]:
            kept.append(line)
    return kept


def _quiet(text: str) -> str:
    """Make text safe inside a docstring."""
    return text.replace("\\", "/").replace('"', "'").replace("\n", " ")
