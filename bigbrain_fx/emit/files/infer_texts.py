"""Plan -> batches.py and infer.py of a bundle for inference: its data, and the entry point.

This file knows how inference is started; what a batch's way through the stages is, is in the
device files.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.emit.files.entry import (
    beginning,
    call_lines,
    data_fields,
    device_fields,
    with_users_code,
)
from bigbrain_fx.emit.files.model_file import (
    OWN_BATCHES,
    UsersCode,
    inputs_lines,
    our_names,
)
from bigbrain_fx.emit.modules.layout import double_quoted, quiet
from bigbrain_fx.emit.modules.names import by_number, device_names
from bigbrain_fx.plan import Plan

OURS = ("INPUTS", "SPECS", "WHOLE")
FILES = (
    "- `infer.py`: the entry point, and `infer(inputs)` for programs of your own; `batches.py`: "
    "data; `runtime/`: messages and bookkeeping"
)


def infer_texts(plan: Plan, own: UsersCode) -> dict[str, str]:
    """Return batches.py and infer.py."""
    constants = our_names(own.training, OURS)
    return {
        "batches.py": _batches_text(plan, own, constants),
        "infer.py": _infer_text(plan, constants),
    }


def infer_commands(plan: Plan) -> list[str]:
    """Return how to start it, a command a line."""
    torchrun = f"torchrun --nproc-per-node {len(plan.stages.devices)} infer.py --outputs out"
    explained = {
        "bigbrain-fx run . --inputs rows.safetensors --outputs out": "all devices on this host",
        torchrun: "the same without bigbrain-fx",
        "python infer.py --in-process --steps 2": "all devices in one process, for pdb",
    }
    return [f"{command:<59}# {what}" for command, what in explained.items()]


def infer_notes(plan: Plan) -> list[str]:
    """Return what a user of the bundle should know of its inputs and outputs, for its README."""
    rows = plan.micro_batches * plan.rows
    names = ", ".join(f"`{name}`" for name, _ in plan.graph.output_names)
    sizes, number = (
        f"A batch has up to {rows} rows; the last one may have fewer: it is "
        "filled up with copies of its last row, whose outputs are dropped.",
        "of any number of rows",
    )
    if not plan.graph.rows_apart:
        sizes = f"Its rows do not stand alone: a batch has {rows} rows, and others are refused."
        number = f"of a multiple of {rows} rows"
    return [
        "It computes what the model computes after `model.eval()`, bit for bit, on micro-batches "
        f"of {plan.rows} rows. {sizes} `--inputs` takes a "
        f"safetensors file with a tensor for each name in `batches.INPUTS`, {number}; "
        f"`--outputs` gets one file for each batch, with {names} in the order of the rows.",
        "",
        "From Python: `from infer import infer; infer({...})` returns the outputs by name.",
    ]


def _batches_text(plan: Plan, own: UsersCode, constants: Mapping[str, str]) -> str:
    title, origin = quiet(plan.graph.name), quiet(own.name)
    what = f"copied from {origin}" if plan.source.has_batches else "the example batch"
    head, ours = [f'"""What {title} is run on: {what}."""', ""], list[str]()
    if not plan.source.has_batches:
        ours += [*_package(("runtime", "example_batches")), *OWN_BATCHES]
    ours += ["", *inputs_lines(plan, constants)]
    return with_users_code(head, [], own.training, ours)


def _infer_text(plan: Plan, constants: Mapping[str, str]) -> str:
    devices = device_names(plan.stages.devices).values()
    fields = [
        *device_fields(plan, [names.program for names in devices]),
        *data_fields("batches", constants).values(),
        f"rows={plan.micro_batches * plan.rows}",
        *([] if plan.graph.rows_apart else ["apart=False"]),
    ]
    classes = [(names.module, names.program) for names in devices]
    classes.sort(key=lambda names: by_number(names[0]))
    lines = [
        f'"""Run {quiet(plan.graph.name)} on rows of data: one process per device.',
        "",
        *(f"    {line}" for line in infer_commands(plan)),
        "",
        "`infer` is the same for a program of your own; `--help` lists what else may be said.",
        '"""',
        "",
        *beginning("infer"),
        "from torch import Tensor",
        "",
        *_package(
            ("", "batches"), *classes, ("runtime", "Inference, infer_in_process, infer_main")
        ),
        "",
        *call_lines("INFERENCE", "Inference", fields),
        "",
        "",
        "def infer(inputs: dict[str, Tensor]) -> dict[str, Tensor]:",
        '    """Return the outputs by name for input tensors by name, of any number of rows.',
        "",
        "    All devices run in this process, in turn; the weights are read at the first call.",
        '    """',
        "    return infer_in_process(INFERENCE, inputs)",
        "",
        "",
        'if __name__ == "__main__":',
        "    infer_main(INFERENCE)",
    ]
    return double_quoted("\n".join(lines) + "\n")


def _package(*imports: tuple[str, str]) -> list[str]:
    """Write imports that work in the folder, and in a package: `from bundle.infer import infer`."""

    def line(module: str, names: str, dot: str) -> str:
        if not module:
            return f"    from . import {names}" if dot else f"    import {names}"
        return f"    from {dot}{module} import {names}"

    return [
        "if __package__:  # imported as part of a package",
        *(line(module, names, ".") for module, names in imports),
        "else:",
        *(line(module, names, "") for module, names in imports),
    ]
