"""Options that several commands share. Knows click; runs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from bigbrain_fx.errors import InputError

Command = Callable[..., Any]
PATH = click.Path(readable=False, path_type=Path)  # the room that reads says what is wrong
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


class Listed(click.Option):
    """An option whose help ends with names that only plug-ins know; `{names}` stands for them."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Fill in the names when the help is shown, and not before: loading plug-ins takes time."""
        self.help = (self.help or "").replace("{names}", ", ".join(self._names()))
        return super().get_help_record(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the names, also after a comma where several are taken."""
        before, comma, begun = incomplete.rpartition(",")
        offered = [f"{before}{comma}{name}" for name in self._names() if name.startswith(begun)]
        return [CompletionItem(name) for name in offered] or super().shell_complete(ctx, incomplete)

    def _names(self) -> tuple[str, ...]:
        from bigbrain_fx.plan import SCHEDULES
        from bigbrain_fx.planning import names

        listed = {"partitioner": names(), "estimator": names("estimator")}
        listed["partitioners"] = listed["partitioner"]
        return listed.get(self.name or "", tuple(sorted(SCHEDULES)))


def _option(flag: str, *others: str, **settings: Any) -> Callable[[Command], Command]:  # noqa: ANN401  # click's own
    """Make an option that all commands take from one variable of the environment."""
    variable = f"BIGBRAIN_FX_{flag.removeprefix('--').replace('-', '_').upper()}"
    return click.option(*others, flag, envvar=variable, **settings)


def profile_option(command: Command) -> Command:
    """Add --profile."""
    text = "Seconds of layers that others measured: a file that docs/how-to/commands.md describes."
    return _option("--profile", type=PATH, help=text)(command)


def json_option(command: Command) -> Command:
    """Add --json."""
    text = "Print JSON alone on stdout, one object a line."
    made = click.option("--json", "as_json", is_flag=True, envvar="BIGBRAIN_FX_JSON", help=text)
    return made(command)


def bundle_argument(command: Command) -> Command:
    """Add BUNDLE, a folder that `split` wrote; its plan.json names it as well."""

    def folder(_ctx: click.Context, _param: click.Parameter, given: Path) -> Path:
        return given.parent if given.name == "plan.json" and given.is_file() else given

    return click.argument("bundle", type=PATH, callback=folder)(command)


def force_file_option(command: Command) -> Command:
    """Add --force, for a command that writes one file; `require_absent` is its other half."""
    return click.option("--force", is_flag=True, help="Replace the file if it is there.")(command)


def force_bundle_option(command: Command) -> Command:
    """Add --force, for a command that writes a bundle."""
    return click.option("--force", is_flag=True, help="Replace a bundle that is there.")(command)


def require_absent(out: Path, force: bool) -> None:
    """Refuse to replace a file, before anything is computed for it, unless that was asked for."""
    if os.path.lexists(out) and not force:
        raise InputError(
            f"{out} exists already",
            code="BX3514",
            help="give another file, or --force to replace it",
        )


_OF_CAPTURE = (
    _option(
        "--time-limit",
        type=POSITIVE,
        default=600.0,
        help="Seconds that loading and capturing the model file may take.",
    ),
    _option(
        "--mode",
        type=click.Choice(["train", "eval"]),
        help="Train, or infer as model.eval() computes: forward only "
        "[default: train, of an ONNX file eval].",
    ),
    _option(
        "--seed",
        type=click.IntRange(min=0, max=2**63 - 1),
        default=0,
        help="Seed of weights, data and dropout.",
    ),
)
_OF_PLANNING = (
    _option(
        "--cache",
        type=COUNT,
        metavar="ROWS",
        help="With --mode eval: generate one position a step, with keys and values kept for so "
        "many rows; for models of rows of tokens.",
    ),
    _option(
        "--micro-batches",
        type=int,
        help="Equal parts that a batch is split into [default: the fastest by forecast].",
    ),
    _option(
        "--schedule",
        cls=Listed,
        help="One of {names} [default: for chains 1f1b, or forward to infer; else list].",
    ),
    _option(
        "--cut-at",
        type=click.Choice(("blocks", "anywhere")),
        help="Cut between the model's layers only, or wherever a step is shortest [default: inside "
        "a layer only where that gains more than forecasts are off].",
    ),
    _option(
        "--pieces",
        type=click.IntRange(min=2),
        help="Virtual stages of each device, for --schedule interleaved [default: 2].",
    ),
    _option(
        "--recompute",
        metavar="auto|ops|all|none|0,2",
        help="What is not kept for the backward but made again: stages (all, 0,2), ops that are "
        "nearly free (ops), or what memory asks for (auto) [default: none; the partitioner `auto` "
        "chooses stages].",
    ),
    _option(
        "--defer",
        metavar="all|none|0,2",
        help="Stages that make gradients of weights apart from those of inputs, which other "
        "devices wait for [default: all with zb-h1, else none].",
    ),
    _option(
        "--offload",
        metavar="activations,state|weights",
        help="What lies in each device's store (`stores` in the cluster file) and not in its "
        "memory: activations, what forwards save for backwards; state, what the optimizer keeps; "
        "weights, and with them all the rest: layer by layer [default: nothing].",
    ),
    _option(
        "--asynchronous",
        type=click.Choice(["2bw", "stash"]),
        help="Steps overlap, and compute with older weights: of one step before (2bw), or with an "
        "update after each micro-batch (stash). Trains otherwise: docs/explanation/asynchronous.md "
        "[default: no].",
    ),
    _option(
        "--compile",
        "compiled",
        is_flag=True,
        help="Run each stage under torch.compile with its fixed shapes: equal to rounding.",
    ),
    _option(
        "--quantize",
        type=click.Choice(["int8"]),
        help="Keep frozen weights of linear layers and embeddings in int8, rounded; what trains "
        "(LoRA adapters) stays as it is [default: no].",
    ),
    _option(
        "--replicas",
        metavar="N|auto",
        help="Copies of the model on devices of their own, which share the micro-batches "
        "[default: one, or those that the cluster file names].",
    ),
    _option(
        "--replica-shares",
        metavar="3:1",
        help="How replicas share the micro-batches [default: by their speed, by forecast].",
    ),
    _option(
        "--zero",
        type=click.Choice(["0", "1", "2", "3"]),
        default="0",
        help="What replicas divide: 1 the optimizer's state, 2 gradients, too, 3 weights, too.",
    ),
    _option(
        "--sum-order",
        type=click.Choice(["replica", "micro", "tree", "backend"]),
        help="How replicas add gradients. replica: each its own first. micro: by number, the bits "
        "of one process. tree: the same bits for any replicas, with less sent than micro. backend: "
        "by torch.distributed's own collectives, to rounding; no process is replaced then "
        "[default: replica; with --zero 2 or 3 micro].",
    ),
    _option(
        "--tensor",
        metavar="N|auto",
        help="Devices that compute each stage together, each with a part of its tensors "
        "[default: 1, no tensor parallelism; the partitioner `auto` chooses].",
    ),
    _option(
        "--tensor-shares",
        metavar="3:1",
        help="How they share what is divided [default: alike; with `auto` by their speed].",
    ),
    _option(
        "--tensor-axes",
        metavar="heads,hidden",
        help="What is divided, by kind or by name [default: all that can be].",
    ),
    _option(
        "--rewrite",
        default="none",
        metavar="none|auto|NAME,NAME",
        help="What may be computed otherwise than the model file says, to rounding. linears: "
        "layers that read one value, as one product. scales: a number on a product, on its smaller "
        "operand. auto: what makes a step faster by forecast.",
    ),
    _option(
        "--effort",
        type=click.Choice(["fast", "normal", "high"]),
        default="normal",
        help="How much `auto` tries: work is counted, not timed, so plans are the same anywhere.",
    ),
    _option(
        "--objective",
        type=click.Choice(["throughput", "latency", "memory"]),
        default="throughput",
        help="What `auto` is after. throughput: the shortest step. latency: the shortest step of "
        "at most 2 micro-batches. memory: of all plans it met that take at most 10 % longer than "
        "the fastest, the one whose fullest device uses the least share of its memory.",
    ),
    _option("--estimator", cls=Listed, help="One of {names} [default: the partitioner's own]."),
    profile_option,
)
_PARTITIONER = _option(
    "--partitioner",
    cls=Listed,
    default="analytical",
    help="One of {names}. Or mine.py:Class, a class of yours.",
)


def _complete_setting(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from bigbrain_fx.planning import preset, settable

    try:
        known = settable(preset(str(ctx.params.get("partitioner") or "analytical"))[0])
    except InputError:  # it is being typed
        return []
    return [CompletionItem(f"{name}=") for name in known if name.startswith(incomplete)]


_SETTINGS = _option(
    "--set",
    "settings",
    multiple=True,
    shell_complete=_complete_setting,
    metavar="NAME=VALUE",
    help="An option of the partitioner; `plugins` lists them.",
)
_PIN = _option(
    "--pin",
    multiple=True,
    metavar="MODULES=DEVICE",
    help="Keep modules on a device, blocks.0-1=d0, say; the partitioner places the rest.",
)
_PLACE = _option(
    "--place",
    type=PATH,
    help="Place all modules as this file says; `explain --placement` writes one to edit.",
)
_OF_THE_MODEL = (
    _option(
        "--assume",
        multiple=True,
        metavar="FILE:LINE=true|false",
        help="Whether the condition in a line of the model holds, where a tensor's value "
        "decides; the bundle checks it [default: what the model does on its example batch].",
    ),
    _option(
        "--leaf",
        multiple=True,
        metavar="NAME",
        help="Keep a module whole, by path or class name: it is neither traced nor cut.",
    ),
    _option(
        "--strict",
        is_flag=True,
        help="Refuse a model of which a trace cannot hold all, with what to change [default: its "
        "whole step runs on one device, as it is].",
    ),
    _option("--devices", "-d", type=PATH, help="The cluster.json."),
)


def capture_options(command: Command) -> Command:
    """Add what every command that captures a model takes."""
    for option in _OF_CAPTURE:
        command = option(command)
    return command


def planning_options(command: Command) -> Command:
    """Add the options that choose a plan."""
    by_hand = (_PLACE, _PIN)
    for option in (*_OF_CAPTURE, *_OF_PLANNING, *by_hand, _SETTINGS, _PARTITIONER, *_OF_THE_MODEL):
        command = option(command)
    return command


def common_options(command: Command) -> Command:
    """Add the options that several plans of one model have in common: all but the partitioner."""
    for option in (*_OF_CAPTURE, *_OF_PLANNING, *_OF_THE_MODEL):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """Add what is said beside a Hugging Face configuration; a model file says it itself."""
    for option in (
        _option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16", "float16"]),
            help="For hf: models: element type of the weights [default: the configuration's].",
        ),
        _option(
            "--seq",
            type=int,
            help="For hf: and ONNX models: tokens of a row [default: up to 128; 16 for ONNX].",
        ),
        _option("--batch", type=int, help="For hf: and ONNX models: rows of a batch [default: 8]."),
    ):
        command = option(command)
    return command
