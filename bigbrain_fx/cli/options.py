"""Options that several commands share. Knows click; runs nothing.

An option of a plan is declared once: flag, group, field of `Options`, and the reader of its text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from bigbrain_fx.cli.command import Option, grouped, reads
from bigbrain_fx.errors import InputError

Command = Callable[..., Any]
Add = Callable[[Command], Command]
PATH = click.Path(readable=False, path_type=Path)  # the package that reads says what is wrong
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)
GIVEN = "bigbrain_fx.cli.option_values"


def option(*names: str, **settings: Any) -> Add:  # noqa: ANN401  # click's own
    """Declare an option of one command."""
    return click.option(*names, **{"cls": Option, **settings})


_shared = partial(option, shared=True)


class Listed(Option):
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


json_option = grouped(
    "output",
    _shared(
        "--json", "as_json", is_flag=True, help="Print JSON alone on stdout, one object a line."
    ),
)
force_file_option = option("--force", is_flag=True, help="Replace the file if it exists.")
force_bundle_option = option("--force", is_flag=True, help="Replace a bundle that exists.")
verbose_option = grouped(
    "output", option("-v", "--verbose", is_flag=True, help="Print the details of the plan, too.")
)
profile_option = grouped(
    "cluster and plan",
    _shared(
        "--profile",
        type=PATH,
        help="Measured seconds of layers: see docs/how-to/choose-a-plan.md.",
    ),
)

goal_options = grouped(
    "cluster and plan",
    _shared(
        "--tokens",
        metavar="N",
        help="Tokens of the whole training (rows, where no input has tokens), as 300e9 or 300B: "
        "how long does it take, what does it cost?",
    ),
    _shared(
        "--max-cost",
        metavar="USD|USD/h",
        help="What all --tokens may cost, or an hour, as 5/h; devices may be left out.",
    ),
    _shared(
        "--min-throughput",
        metavar="N",
        help="Tokens (or rows) a second at least; devices may be left out.",
    ),
    _shared(
        "--deadline",
        metavar="DURATION",
        help='For all --tokens, as "12h" or "3d"; devices may be left out.',
    ),
)
"""Limits of money and time."""


def checkpoint_option(text: str) -> Add:
    """Declare the folder of a run's checkpoints."""
    return option("--checkpoint-dir", type=PATH, help=text)


def bundle_argument(command: Command) -> Command:
    """Add BUNDLE, a folder that `split` wrote; its plan.json names it as well."""

    def folder(_ctx: click.Context, _param: click.Parameter, given: Path) -> Path:
        return given.parent if given.name == "plan.json" and given.is_file() else given

    return click.argument("bundle", type=PATH, callback=folder)(command)


def require_absent(out: Path | None, force: bool) -> None:
    """Refuse to replace a file before anything is computed for it.

    Raises:
        InputError: the file exists, and `force` is off.
    """
    if out is not None and os.path.lexists(out) and not force:
        raise InputError(
            f"{out} exists already",
            code="BX3514",
            help="give another file, or --force to replace it",
        )


devices_option = _shared("--devices", "-d", type=PATH, help="The cluster.json.")
_PARTITIONER = _shared(
    "--partitioner",
    cls=Listed,
    default="analytical",
    help="One of {names}. Or mine.py:Class, a class of yours.",
)
_FIRST = grouped(
    "",
    _shared(
        "--micro-batches",
        type=int,
        help="Equal parts of a batch [default: the fastest by forecast].",
    ),
    _shared(
        "--schedule",
        cls=Listed,
        help="One of {names} [default: for chains 1f1b, or forward to infer; else list].",
    ),
    _shared(
        "--replicas",
        metavar="N|auto",
        callback=reads("read_number", GIVEN, at="--replicas"),
        help="Data parallelism: copies of the model [default: 1].",
    ),
    _shared(
        "--tensor-parallel",
        metavar="N|auto",
        callback=reads("read_number", GIVEN, at="--tensor-parallel"),
        help="Devices that compute each stage together [default: 1].",
    ),
    _shared(
        "--activation-checkpointing",
        metavar="HOW",
        callback=reads("read_recompute"),
        help="Recompute in the backward: whole stages (all, 0,2), cheap ops (ops), or as needed to "
        "fit (auto) [default: none].",
    ),
)


def _without_cache(_context: click.Context, _option: click.Parameter, value: bool) -> None:
    """Let this command, and the processes that it starts, keep and take nothing."""
    if value:
        from bigbrain_fx.frontend import NO_CACHE

        os.environ[NO_CACHE] = "1"


_CAPTURE = grouped(
    "model",
    _shared(
        "--mode",
        type=click.Choice(["train", "eval"]),
        help="Train, or infer as model.eval() computes: forward only [default: train, of an ONNX "
        "file eval].",
    ),
    _shared(
        "--seed",
        type=click.IntRange(min=0, max=2**63 - 1),
        default=0,
        help="Seed of weights, data and dropout.",
    ),
    _shared(
        "--time-limit",
        type=POSITIVE,
        default=600.0,
        help="Seconds that loading and capturing the model file may take.",
    ),
    _shared(
        "--no-cache",
        is_flag=True,
        expose_value=False,
        callback=_without_cache,
        help="Find anew what an earlier command found of the same model.",
    ),
)
model_options = grouped(
    "model",
    _shared(
        "--batch",
        type=int,
        help="For hf: and ONNX models: rows of a batch [default: 8].",
    ),
    _shared(
        "--seq",
        type=int,
        help="For hf: and ONNX models: tokens of a row [default: up to 128; 16 for ONNX].",
    ),
    _shared(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="For hf: models: element type of the weights [default: the configuration's].",
    ),
)
_MODEL = grouped(
    "model",
    _shared(
        "--opaque",
        "leaves",
        multiple=True,
        metavar="NAME",
        help="Do not trace or cut this module: its path or class name.",
    ),
    _shared(
        "--assume",
        multiple=True,
        metavar="FILE:LINE=true|false",
        callback=reads("read_assumptions", GIVEN),
        help="Value of a condition that depends on a tensor; the bundle checks it [default: that "
        "of the example batch].",
    ),
    _shared(
        "--strict",
        is_flag=True,
        help="Refuse a model that cannot be traced whole, and say what to change [default: run the "
        "module around that, or the whole step, on one device].",
    ),
    _shared(
        "--kv-cache",
        type=click.IntRange(min=0),
        default=0,
        show_default=False,
        metavar="ROWS",
        help="With --mode eval: generate one position a step with a KV cache for so many rows; for "
        "models of rows of tokens.",
    ),
)
_PLAN = grouped(
    "",
    grouped(
        "cluster and plan",
        _shared(
            "--estimator",
            cls=Listed,
            help="One of {names} [default: the partitioner's own].",
        ),
        profile_option,
        _shared(
            "--cut-at",
            type=click.Choice(("blocks", "anywhere")),
            help="Cut between the model's layers only, or wherever a step is shortest [default: "
            "inside a layer only where the gain exceeds the error of forecasts].",
        ),
        _shared(
            "--effort",
            type=click.Choice(["fast", "normal", "high"]),
            default="normal",
            help="Search budget of `auto`, in work and not in time: a plan is the same on any "
            "machine.",
        ),
        _shared(
            "--objective",
            type=click.Choice(["throughput", "latency", "memory", "cost"]),
            default="throughput",
            help="Objective of `auto`. throughput: the shortest step. latency: the shortest step "
            "of at most 2 micro-batches. memory: of all plans that take at most 10 % longer than "
            "the fastest, the one whose fullest device uses the least share of its memory. cost: "
            "the least money a step, on as many devices as that takes; the cluster file has the "
            "prices.",
        ),
    ),
    grouped(
        "parallelism",
        _shared(
            "--replica-ratio",
            metavar="3:1",
            callback=reads("read_ratio", GIVEN, at="--replica-ratio"),
            help="Split of the micro-batches among replicas [default: by forecast speed].",
        ),
        _shared(
            "--zero",
            "zero_stage",
            type=click.Choice(["0", "1", "2", "3"]),
            default="0",
            callback=reads("read_stage", GIVEN),
            help="ZeRO stage: replicas shard 1 optimizer states, 2 also gradients, 3 also weights.",
        ),
        _shared(
            "--shard-group",
            metavar="N|host",
            callback=reads("read_shard_group", GIVEN),
            help="Hybrid sharding (HSDP): ZeRO shards among N replicas, or those on one host, and "
            "each such group has all shards [default: all replicas are one group].",
        ),
        _shared(
            "--tp-ratio",
            metavar="3:1",
            callback=reads("read_ratio", GIVEN, at="--tp-ratio"),
            help="Split within a tensor-parallel group [default: equal].",
        ),
        _shared(
            "--tp-axes",
            metavar="heads,hidden",
            callback=reads("read_axes", GIVEN),
            help="Axes that a tensor-parallel group splits, by kind or name [default: all "
            "possible].",
        ),
    ),
    grouped(
        "schedule",
        _shared(
            "--virtual-stages",
            type=click.IntRange(min=2),
            help="Virtual stages of each device, for --schedule interleaved [default: 2].",
        ),
        _shared(
            "--delay-weight-gradients",
            metavar="all|none|0,2",
            callback=reads("read_defer"),
            help="Stages that delay weight gradients (zero bubble) [default: all with zb-h1, else "
            "none].",
        ),
        _shared(
            "--asynchronous",
            type=click.Choice(["2bw", "stash"]),
            help="Overlap steps, which then compute with stale weights: of one step before (2bw), "
            "or with an update after each micro-batch (stash). Results differ from synchronous "
            "training: docs/explanation/asynchronous.md [default: no].",
        ),
    ),
    grouped(
        "memory",
        _shared(
            "--offload",
            metavar="activations,state|weights",
            callback=reads("read_offload"),
            help="Tensors to hold in host memory or on disk (`stores` in the cluster file): saved "
            "activations, optimizer state; or weights and all else, layer by layer [default: "
            "nothing].",
        ),
        _shared(
            "--quantize",
            type=click.Choice(["int8"]),
            help="Hold frozen weights of linear layers and embeddings in int8, rounded; those that "
            "train (LoRA adapters) stay as they are [default: no].",
        ),
    ),
    grouped(
        "numerics",
        _shared(
            "--compile",
            "compiled",
            is_flag=True,
            help="Run each stage under torch.compile with its fixed shapes: equal to rounding.",
        ),
        _shared(
            "--all-reduce-order",
            type=click.Choice(["replica", "micro", "tree", "backend"]),
            help="Order in which replicas add gradients. replica: each its own first; fewest "
            "messages. micro: bitwise equal to one process. tree: bitwise equal for any number of "
            "replicas, with fewer messages than micro. backend: torch.distributed's collectives, "
            "to rounding; dead processes are then not replaced [default: replica; with --zero 2 or "
            "3 micro].",
        ),
    ),
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


_BY_HAND = grouped(
    "cluster and plan",
    _shared(
        "--set",
        "settings",
        multiple=True,
        shell_complete=_complete_setting,
        metavar="NAME=VALUE",
        help="An option of the partitioner; `plugins` lists them.",
    ),
    _shared(
        "--pin",
        "pins",
        multiple=True,
        metavar="MODULES=DEVICE",
        callback=reads("read_pins"),
        help="Place modules on a device, as blocks.0-1=d0; the partitioner places the others.",
    ),
    _shared(
        "--place",
        type=PATH,
        help="Place all modules as this file says; `explain --placement` writes one to edit.",
    ),
)
capture_options = _CAPTURE
"""Options of every command that captures a model."""
common_options = grouped("", devices_option, _FIRST, _CAPTURE, _MODEL, _PLAN)
"""Options that several plans of one model have in common: all but the partitioner."""
planning_options = grouped("", _PARTITIONER, _FIRST, _CAPTURE, _MODEL, _BY_HAND, _PLAN)
"""Options that choose a plan."""
