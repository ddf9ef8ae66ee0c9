"""Plan -> README.md of a bundle. This file knows what a reader of a bundle asks first."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Stage, micro_text
from bigbrain_fx.emit.files import infer_texts, train_texts
from bigbrain_fx.emit.files.code import BLOCKS
from bigbrain_fx.emit.files.model_file import UsersCode
from bigbrain_fx.emit.modules.names import device_names
from bigbrain_fx.plan import (
    Plan,
    tensor_text,
)

OURS = ("- `device_", "- `training.py`: data", "- `weights/`:")  # of any version


def readme_text(plan: Plan, users: Sequence[str], *, lean: bool = False, bare: bool = False) -> str:
    """Return the README of a bundle; `users` are its lines about files of the user's."""
    trains = plan.mode == "train"
    commands = infer_texts.infer_commands(plan)
    commands = train_texts.train_commands(plan, lean, bare) if trains else commands
    count = len(plan.stages.devices)
    hosts = {plan.cluster.device[name].host for name in plan.stages.devices}
    lines = [
        f"# {plan.graph.name} on {count} device{'s' * (count > 1)}",
        "",
        "Written by bigbrain-fx. It needs torch and safetensors, and nothing of bigbrain-fx: "
        "read it, change it, keep it.",
        "",
        "```",
        *commands,
        "```",
        "",
        *([] if trains else [*infer_texts.infer_notes(plan), ""]),
        *(_host_commands(plan, lean) if len(hosts) > 1 else []),
        f"Schedule {plan.schedule}, {micro_text(plan.micro_batches)} of {plan.rows} rows, "
        f"seed {plan.seed}.",
        *_remarks(plan),
        *_stores(plan),
        *_overlap(plan),
        *_replicas(plan),
        *([f"{tensor_text(plan)}"] if plan.placement.tensor else []),
        "",
        "| device | host | stages | parameters and buffers | forecast busy | forecast peak |",
        "|---|---|---|---|---|---|",
        *(_row(plan, device) for device in plan.stages.devices),
        "",
        *_files(plan, lean),
        *users,
        "",
        "Messages are not encrypted or authenticated: use a trusted network.",
    ]
    return "\n".join(lines) + "\n"


def _remarks(plan: Plan) -> list[str]:
    """Say what stages do otherwise than the model file, each where it is so."""
    own = "recompute", "split", "compiled", "quantised"
    return [_sentence(text) for name, text in plan.said.items() if name in own]


def _sentence(text: str) -> str:
    """Return text with a large first letter and a full stop; names in it stay as they are."""
    return f"{text[:1].upper()}{text[1:]}."


def _replicas(plan: Plan) -> list[str]:
    """Say what a replica is, where there are several."""
    if not plan.stages.micros:
        return []
    return [
        "",
        "A replica is a whole copy of the model: it computes some of a step's micro-batches, and "
        "at the end of a step all replicas sum their gradients.",
        f"Here: {plan.said['replicas']}.",
    ]


def _overlap(plan: Plan) -> list[str]:
    """Say whose weights a step computes with, where steps overlap."""
    if not plan.stages.asynchronous:
        return []
    return [
        "",
        f"{_sentence(plan.said['asynchronous'])} It trains otherwise than one process does: "
        "`verify` compares it with that rule.",
    ]


def _stores(plan: Plan) -> list[str]:
    """Say what lies in stores, and how to name other folders."""
    if not plan.stages.offload:
        return []
    return [_sentence(plan.said["offload"]), "Another folder of a disk: `--offload-dir FOLDER`."]


def _files(plan: Plan, lean: bool) -> list[str]:
    trains = train_texts.FILES + ("" if lean else train_texts.SUPERVISED)
    step = "and its step" if plan.mode == "train" else "and its part of a batch"
    first = device_names(plan.stages.devices)[plan.stages.devices[0]].module
    return [
        f"- `{first}.py`, one for each device: the classes of its stages, with the parameter names "
        f"of the model, {step}; block classes that several devices have, if any, stand in "
        f"`{BLOCKS}.py`",
        trains if plan.mode == "train" else infer_texts.FILES,
        "- `weights/`: one safetensors file per device; `plan.json`; `report.html`; "
        "`timeline.json` (open it in Perfetto)",
    ]


def users_files(own: UsersCode) -> list[str]:
    """Say what a bundle has of the model file beside its training."""
    lines = []
    if own.functions.text and not own.name.endswith(".py"):
        lines.append(
            "- `functions.py`: builds the modules that stages call as they are (opaque modules); "
            "it needs transformers"
        )
    elif own.functions.text:
        lines.append(
            "- `functions.py`: code of the model file that stages call as it is (custom autograd "
            "functions, opaque modules, a loss that cannot be traced): it needs what that needs"
        )
    return [*lines, *(f"- `{path.name}`: copied from beside the model file" for path in own.files)]


def told_files(readme: str) -> list[str]:
    """Return what a README says of files, but for our own."""
    lines = [line for line in readme.splitlines() if line.startswith("- `")]
    return [line for line in lines if not line.startswith(OURS)]


def _row(plan: Plan, device: str) -> str:
    stages: Sequence[Stage] = plan.stages.of(device)
    numbers = ", ".join(str(stage.index) for stage in stages)
    tensors = len({name for stage in stages for name in stage.params})
    entry = plan.forecast.of(device)
    host = plan.cluster.device[device].host
    peak = f"{entry.peak_bytes / 2**20:.0f} MiB"
    return f"| {device} | {host} | {numbers} | {tensors} | {entry.busy_s:.3f} s | {peak} |"


def _host_commands(plan: Plan, lean: bool) -> list[str]:
    """Say what to type on several hosts when nothing but this folder is there."""
    what = "One command for each device (put the first host's address for ADDRESS)"
    if plan.mode == "train" and not lean:
        what += "; with bigbrain-fx, `bigbrain-fx run .` prints commands that replace what dies"
    lines = [f"{what}:", "", "```"]
    world = len(plan.stages.devices)
    entry = "train.py --steps 100" if plan.mode == "train" else "infer.py --outputs out"
    hosts = [plan.cluster.device[name].host for name in plan.stages.devices]
    for rank, host in enumerate(hosts):
        ranks = f"RANK={rank} LOCAL_RANK={hosts[:rank].count(host)} WORLD_SIZE={world}"
        lines.append(f"{host}$ {ranks} MASTER_ADDR=ADDRESS MASTER_PORT=29500 python {entry}")
    return [*lines, "```", ""]
