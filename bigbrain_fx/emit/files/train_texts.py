"""Plan -> training.py, train.py and launch.py of a bundle: data and optimizer, and how to start.

This file knows how training is started; what a step does is in the device files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bigbrain_fx.core import ROW_COUNTS, LossCount, OptimizerData
from bigbrain_fx.emit.files.entry import (
    beginning,
    call_lines,
    data_fields,
    device_fields,
    loading,
    with_users_code,
)
from bigbrain_fx.emit.files.model_file import (
    OWN_BATCHES,
    OWN_EXAMPLES,
    UsersCode,
    inputs_lines,
    our_names,
    source_file,
)
from bigbrain_fx.emit.modules.layout import double_quoted, quiet, wrapped
from bigbrain_fx.emit.modules.names import by_number, device_names
from bigbrain_fx.plan import Plan, Source

OURS = (
    "INPUTS",
    "SPECS",
    "WHOLE",
    "OPTIMIZER",
    "LR_SCALE",
    "CLIP_NORM",
    "SCHEDULER",
    "GRAD_SCALER",
    "SPLITTING",
    "LOSS_WEIGHT",
)
FILES = (
    "- `training.py`: data, optimizer; `train.py`: the entry point; `runtime/`: messages and "
    "bookkeeping"
)
SUPERVISED = "; `launch.py` and `supervisor/`: replace processes that die"
_IMPORT = "from runtime import Bundle, Hooks, Training"
_BARE_IMPORT = "from runtime import Bundle, Training, main"
_HOOKS = """\
# Your own functions, called in every process at these places of a step. At on_step_end the step's
# messages have left and the optimizer has stepped: under launch.py this is the recovery point, and
# what on_send sees is kept until no device can need it again.
HOOKS = Hooks(
    on_step_begin=[],  # f(device, step)
    on_step_end=[],  # f(device, step)
    on_send=[],  # f(device, channel, tensor)
    on_recv=[],  # f(device, channel, tensor)
)"""


def train_texts(
    plan: Plan, own: UsersCode, lean: bool = False, bare: bool = False
) -> dict[str, str]:
    """Return training.py, train.py and, where it is not lean, launch.py."""
    constants = our_names(own.training, OURS)
    return {
        "training.py": _training_text(plan, own, constants),
        "train.py": _train_text(plan, constants, lean, bare),
        **({} if lean else {"launch.py": launch_text(plan)}),
    }


def train_commands(plan: Plan, lean: bool = False, bare: bool = False) -> list[str]:
    """Return how to start it, a command a line."""
    world = len(plan.stages.devices)
    torchrun = f"torchrun --nproc-per-node {world} train.py --steps 100"
    supervised = {
        "bigbrain-fx run . --steps 100": "on this host; replaces what dies",
        "python launch.py --steps 100": "the same without bigbrain-fx",
    }
    explained = {
        **({"bigbrain-fx run . --steps 100": "on this host"} if lean else supervised),
        torchrun: "under torchrun; one death ends all",
        "python train.py --in-process --steps 2": "all devices in one process, for pdb",
    }
    if bare:
        one = f"RANK=0 WORLD_SIZE={world} python train.py --steps 100"
        explained = {torchrun: "on this host", one: "the same, a process for each RANK"}
    return [f"{command:<57}# {what}" for command, what in explained.items()]


_CONTRACT = (
    "Every device's process calls these for itself: `batches(seed)` must give all of them the same",
    "batches (they are compared), and an optimizer sees its own device's parameters only. To",
    "clip gradients where the model file did not, split the model again: norms are messages.",
    '"""',
)


def _training_text(plan: Plan, own: UsersCode, constants: Mapping[str, str]) -> str:
    source = plan.source
    runtime = [] if source.has_optimizer else ["adamw"]
    example = "repeated" if plan.graph.is_opaque_step else "example_batches"
    runtime += [] if source.has_batches else [example]
    runtime = [*["current"] * _clip_norm(plan).startswith("current"), *runtime]
    runtime = [*["Splitting"] * (not source.splits_evenly), *runtime]
    runtime = [*["LossWeight"] * source.weighs, *["marking"] * _is_marked(plan), *runtime]
    runtime += ["OptimizerGroups"] * (source.optimizer is not None)
    runtime += ["given_parts"] * (source.has_micro and not source.has_batches)
    title, origin = quiet(plan.graph.name), quiet(own.name)
    head = [
        f'"""How {title} is trained; the functions are copied from {origin}.',
        "",
        *_CONTRACT,
        "",
    ]
    if plan.graph.is_opaque_step:
        head = [f'"""How {title} is trained: as {origin} says, which stands beside this."""', ""]
    imports = [f"from runtime import {', '.join(runtime)}"] if runtime else []
    if source.optimizer is not None and source.optimizer.module:
        imports = [f"import {source.optimizer.module}", "", *imports]
    examples = OWN_EXAMPLES if plan.graph.is_opaque_step else OWN_BATCHES
    ours = [] if source.has_batches else [*examples]
    ours += ["", *inputs_lines(plan, constants)]
    optimizer = "optimizer" if source.has_optimizer else "adamw"
    optimizer = _optimizer_groups(source.optimizer) if source.optimizer else optimizer
    optimizer = f"marking({source.marks!r}, {optimizer})" if _is_marked(plan) else optimizer
    ours += wrapped(f"{constants['OPTIMIZER']} = {optimizer}", 0)
    ours.append(f"{constants['LR_SCALE']} = {'lr_scale' if source.has_lr_scale else None}")
    ours.append(f"{constants['CLIP_NORM']} = {_clip_norm(plan)}")
    ours += [f"{constants['SCHEDULER']} = scheduler"] * source.has_scheduler
    if source.grad_scaler is not None:
        ours.append(f"{constants['GRAD_SCALER']} = {source.grad_scaler!r}")
    if source.weighs:
        ours += wrapped(f"{constants['LOSS_WEIGHT']} = {_loss_weight(plan)}", 0)
    if not source.splits_evenly:
        ours += wrapped(f"{constants['SPLITTING']} = {_splitting(source, constants)}", 0)
    return with_users_code(head, imports, own.training, ours)


def _optimizer_groups(optimizer: OptimizerData) -> str:
    """Return an optimizer that was made once of all parameters, by its class and their names."""
    kind = f"{optimizer.module}.{optimizer.name}".removeprefix(".")
    groups = [{"params": list(each.params), **each.options} for each in optimizer.groups]
    return f"OptimizerGroups({kind}, {groups!r}, {optimizer.options!r})"


def _is_marked(plan: Plan) -> bool:
    """Whether an optimizer of the user's may read attributes that the model's parameters have."""
    source = plan.source
    reads = source.has_optimizer and source.optimizer is None
    return bool(source.marks and reads and not plan.graph.is_opaque_step)


def _clip_norm(plan: Plan) -> str:
    """Return the norm to clip to; of a file that is run as it is, what that says at each step."""
    if plan.source.clip_norm is None or not plan.graph.is_opaque_step:
        return repr(plan.source.clip_norm)
    return f'current({source_file(plan).stem!r}, "clip_norm")'


def _loss_weight(plan: Plan) -> str:
    """Return by which count micro-batches weigh: the user's, that of labels, or one of each row."""
    source = plan.source
    if not source.has_batches:
        count: str = f"lambda batch: {LossCount((ROW_COUNTS,)).expression}"
    elif source.loss_count is not None:
        count = f"lambda batch: {source.loss_count.expression}"
    else:
        count = "loss_weight"
    dims = dict(_cut_elsewhere(plan)) if source.has_batches else {}
    return f"LossWeight({count}{f', dims={dims!r}' if dims else ''})"


def _cut_elsewhere(plan: Plan) -> Iterator[tuple[tuple[str | int, ...], int | None]]:
    """Yield the entries that are not cut along dimension 0."""
    for entry in plan.graph.inputs:
        if not entry.batched:
            yield entry.key, None
        elif dim := plan.source.batch_dims.get(entry.name, 0):
            yield entry.key, dim


def _splitting(source: Source, constants: Mapping[str, str]) -> str:
    """Return how batches become micro-batches; the example's file has its rows first."""
    dims = source.batch_dims if source.has_batches else {}
    said: dict[str, object] = {"drop_last": source.drop_last, "dims": dims, "pad": source.pad}
    said |= {"fixed": source.fixed, "offsets": source.offsets, "divided": source.divided}
    said |= {"lengths": source.lengths, "buckets": source.buckets}
    fields = [f"{name}={value!r}" for name, value in said.items() if value not in (None, {}, ())]
    own = "micro" if source.has_batches else "given_parts"
    fields += [f"micro={own}"] * source.has_micro
    fields += [f"weigh={constants['LOSS_WEIGHT']}"] * source.weighs
    return f"Splitting({', '.join(fields)})"


def _train_text(plan: Plan, constants: Mapping[str, str], lean: bool, bare: bool) -> str:
    devices = device_names(plan.stages.devices).values()
    how = [f"training.{constants[name]}" for name in ("OPTIMIZER", "LR_SCALE", "CLIP_NORM")]
    how += [f"scheduler=training.{constants['SCHEDULER']}"] * plan.source.has_scheduler
    if plan.source.grad_scaler is not None:
        how.append(f"grad_scaler=training.{constants['GRAD_SCALER']}")
    data = data_fields("training", constants)
    specs = data.pop("specs")
    fields = [
        *device_fields(plan, [f"{names.module}.{names.program}" for names in devices]),
        *data.values(),
        f"training=Training({', '.join(how)})",
        specs,
        *[f"splitting=training.{constants['SPLITTING']}"] * (not plan.source.splits_evenly),
        *([] if bare else ["hooks=HOOKS"]),
    ]
    hooks = "HOOKS has the places for functions of your own; `--help` lists what else may be said."
    lines = [
        f'"""Train {quiet(plan.graph.name)}: one process per device.',
        "",
        *(f"    {line}" for line in train_commands(plan, lean, bare)),
        "",
        "`--help` lists what else may be said." if bare else hooks,
        '"""',
        "",
        *(beginning(_BARE_IMPORT) if bare else beginning("from runtime import main", 4)),
        *sorted((f"import {names.module}" for names in devices), key=by_number),
        "import training",
        *([] if bare else [_IMPORT, "", *_HOOKS.splitlines()]),
        "",
        *call_lines("BUNDLE", "Bundle", fields),
        "",
        'if __name__ == "__main__":',
        "    main(BUNDLE)",
    ]
    return double_quoted("\n".join(lines) + "\n")


def _joining(hosts: Sequence[str]) -> list[str]:
    """Return how several hosts are started: the first decides, the others are its agents."""
    first, *others = dict.fromkeys(hosts)
    return [
        "",
        "All on this host. Over several, where it was split with `--with hosts`: on",
        f"{quiet(first)}, with an address that others reach,",
        "",
        "    python launch.py --steps 100 --listen ADDRESS:29400 --secret FILE",
        "",
        "(FILE has a certificate and its key; without it launch.py says how they are made) and on",
        "each other host, with the same bundle and FILE,",
        "",
        *(
            f"    python launch.py --join ADDRESS:29400 --host {quiet(host)} --secret FILE"
            for host in others
        ),
    ]


def _replacing(plan: Plan) -> list[str]:
    """Say what becomes of a process that dies."""
    if plan.stages.have_peers:
        return [
            "A process that dies is replaced by a spare. It takes the device's state from a peer",
            "in another replica, and begins its step again; the result is the same.",
        ]
    return [
        "A process that dies is replaced by a standby worker, which takes the device's",
        "last in-memory checkpoint and replays later steps; the result is the same.",
    ]


def launch_text(plan: Plan) -> str:
    """Return launch.py."""
    hosts = tuple(plan.cluster.device[name].host for name in plan.stages.devices)
    several = len(set(hosts)) > 1
    given = '"train.py", HOSTS' if several else '"train.py"'
    given += ", replicas=True" * bool(plan.stages.micros)
    lines = [
        f'"""Train {quiet(plan.graph.name)} on this host and keep it going when processes die.',
        "",
        "    python launch.py --steps 100 --standby 1",
        *(_joining(hosts) if several else []),
        "",
        *_replacing(plan),
        '"""',
        "",
        "import sys",
        "from pathlib import Path",
        "",
        "sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under `python -P` and -I",
        "",
        *loading("from supervisor import main"),
        "",
        *wrapped(f"DEVICES = {plan.stages.devices!r}", 0),
        *(wrapped(f"HOSTS = {hosts!r}", 0) if several else []),
        "",
        'if __name__ == "__main__":',
        f"    main(Path(__file__).resolve().parent, DEVICES, {given})",
    ]
    return double_quoted("\n".join(lines) + "\n")
