"""Stages -> stages of which some recompute: they save no activations and run forward twice.

`plan.lightening` chooses single ops to recompute; this module applies and reports its choice.

The module knows graph and stages; it does not know time, memory or schedules, and chooses no stage.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The segment is a whole
stage, as in GPipe (Huang et al., 2019, section 2.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from bigbrain_fx.core import Graph, ModuleCall, Op, ParamRef, Stage, Stages
from bigbrain_fx.errors import InputError

Wanted: TypeAlias = tuple[int, ...] | Literal["all", "ops", "auto"] | None
"""Which stages: their numbers, all that have a backward, or none.

"ops" and "auto" are of ops instead: see `plan.lightening`.
"""


def read_recompute(text: str | None) -> Wanted:
    """Read "auto", "ops", "all", "none" or "0,2"; nothing, which leaves it open, is None.

    Raises:
        InputError: it is none of these.
    """
    found: Wanted = _read(text, "--activation-checkpointing", "auto, ops, all, none")
    return found


def _read(text: str | None, flag: str, words: str) -> Any:  # noqa: ANN401  # one of the words
    """Read an option that takes some words, the last of them "none", or the numbers of stages."""
    if text is None or text in words.split(", "):
        return () if text == "none" else text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(
            f"expected {words} or numbers of stages, found {text!r}",
            code="BX1265",
            at=flag,
            help=f"write {flag} {words.partition(',')[0]}, or {flag} 0,2",
        )
    return tuple(dict.fromkeys(map(int, parts)))


def recomputing(
    graph: Graph, stages: Stages, trained: Iterable[int], wanted: Wanted, *, lenient: bool = False
) -> Stages:
    """Mark the stages that run their forward again before each backward.

    `lenient` leaves out numbers that are no stages with a backward, as after ops have moved.

    Raises:
        InputError: there is no such stage, it has no backward, or it cannot run twice.
    """
    flag, what = "--activation-checkpointing", "to recompute for"
    numbers = _numbers(stages, frozenset(trained), wanted, flag, what, lenient=lenient)
    for number in sorted(numbers):
        _require_repeatable(graph, stages.stages[number])
    marked = (replace(s, runs_again=s.index in numbers) for s in stages.stages)
    return replace(stages, stages=tuple(marked)) if numbers else stages


def wanted_by(stages: Stages, trained: Iterable[int]) -> Wanted:
    """Return what was asked for, to ask the same of another cut."""
    numbers = stages.recompute
    if stages.again:
        return "auto" if numbers else "ops"
    return "all" if numbers and frozenset(numbers) == frozenset(trained) else numbers or None


def recompute_text(stages: Stages) -> str:
    """Say which stages, or ops of them, run again; nothing, where none does."""
    return "; ".join(filter(None, (_whole_text(stages), _ops_text(stages))))


def _ops_text(stages: Stages) -> str:
    counts = ((n, len(stages.stages[n].again)) for n in stages.again)
    each = (f"{count} op{'s' * (count > 1)} of stage {n}" for n, count in counts)
    found = ", ".join(each)
    return f"recompute: each backward makes {found} again" if found else ""


def _whole_text(stages: Stages) -> str:
    which = _stages_text(stages.recompute)
    return f"recompute: each backward runs the forward of {which} again" if which else ""


def _stages_text(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"stage{'s' * (len(numbers) > 1)} {listed}" if numbers else ""


def _numbers(
    stages: Stages, known: frozenset[int], wanted: Wanted, flag: str, what: str, *, lenient: bool
) -> frozenset[int]:
    """Return the stages that were asked for; refuse numbers that are none with a backward."""
    asked = () if isinstance(wanted, str) else wanted or ()
    numbers = known if wanted == "all" else frozenset(asked)
    if lenient:
        return numbers & known
    listed = ", ".join(map(str, sorted(known)))
    for number in sorted(numbers - known):
        exists = number < len(stages.stages)
        found = f"stage {number} has no backward" if exists else f"there is no stage {number}"
        raise InputError(
            f"{found} {what}",
            code="BX1266",
            at=flag,
            help=f"choose from {listed}, or write all" if known else "leave it out: nothing trains",
        )
    return numbers


def may_repeat(graph: Graph, stage: Stage) -> bool:
    """Whether a stage can run again as a whole."""
    try:
        _require_repeatable(graph, stage)
    except InputError:
        return False
    return True


def _require_repeatable(graph: Graph, stage: Stage) -> None:
    """Refuse a stage that writes what training changes, too: what it reads twice would differ."""
    kept = next((op for op in map(graph.op.__getitem__, stage.ops) if op.state), None)
    if kept is not None:
        raise InputError(
            f"stage {stage.index} has an opaque module with state in attributes ('{kept.name}'), "
            "so it cannot run again",
            code="BX1353",
            at=kept.source or None,
            help="leave the stage out of --activation-checkpointing",
        )
    for name, op in _written(graph, stage):
        if graph.param[name].is_trained:
            raise InputError(
                f"stage {stage.index} writes into the trained parameter '{name}' in its forward, "
                "so it cannot run again",
                code="BX1267",
                at=graph.op[op].source or None,
                help="leave the stage out of --activation-checkpointing",
            )


def _written(graph: Graph, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield the tensors of the model that a stage writes, and the op that does."""
    for op in stage.ops:
        for name in graph.op[op].mutates:
            if name in graph.param:
                yield name, op


# ------------------------------------------------------------------------------------------------
# Stages -> Stages of which some leave gradients of weights to a BackwardWeight.
#
# Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.


Defer: TypeAlias = tuple[int, ...] | Literal["all"] | None
"""Which stages: their numbers, all that have a backward, or what the schedule is made for (None).

No numbers: none.
"""

LAYERS: Mapping[str, str] = {
    "aten.linear.default": "Linear",
    "aten.embedding.default": "Embedding",
    **{f"aten.conv{n}d.default": f"Conv{n}d" for n in (1, 2, 3)},
    "aten.conv_transpose1d.default": "ConvTranspose1d",
    **{f"aten.conv_transpose{n}d.input": f"ConvTranspose{n}d" for n in (2, 3)},
}
"""Ops whose weight's gradient can wait -> the layer of torch.nn that runs them."""
_TORCH = "torch.nn.modules."
_LEAF = "leaf."
_REAL = frozenset({"float16", "bfloat16", "float32", "float64"})  # complex: other products
_SPARSE = 4  # the place of `sparse` among embedding's arguments


def read_defer(text: str | None) -> Defer:
    """Read "all", "none" or "0,2".

    Raises:
        InputError: it is none of these.
    """
    found: Defer = _read(text, "--delay-weight-gradients", "all, none")
    return found


def deferring(
    graph: Graph, stages: Stages, trained: Iterable[int], wanted: Defer, *, lenient: bool = False
) -> Stages:
    """Say of each stage which parameters' gradients wait; where none may, the stage defers nothing.

    `lenient` leaves out numbers that are no stages with a backward, as after ops have moved.

    Raises:
        InputError: there is no such stage, or it has no backward.
    """
    flag, what = "--delay-weight-gradients", "to split"
    numbers = _numbers(stages, frozenset(trained), wanted, flag, what, lenient=lenient)
    if not numbers:
        return stages
    known_layers = _Layers(
        Counter(op.modules[-1] for op in graph.ops if op.modules and op.outputs),
        Counter(param.name.rpartition(".")[0] for param in graph.params),
    )
    marked = (
        replace(s, deferred=_may_wait(graph, s, known_layers)) if s.index in numbers else s
        for s in stages.stages
    )
    return replace(stages, stages=tuple(marked))


def defer_of(stages: Stages, trained: Iterable[int]) -> Defer:
    """Return what was asked for, to ask the same of another cut."""
    numbers = stages.deferring
    return "all" if numbers and frozenset(numbers) == frozenset(trained) else numbers


def defer_text(stages: Stages) -> str:
    """Say which stages make weights' gradients apart; nothing, where none does."""
    which = _stages_text(stages.deferring)
    return f"split backward: gradients of weights of {which} wait" if which else ""


def waiting_ops(graph: Graph, stage: Stage) -> frozenset[str]:
    """Return the ops of a stage whose backward makes gradients of inputs only."""
    deferred = frozenset(stage.deferred)
    return frozenset(
        name
        for name in stage.ops
        if graph.op[name].target in LAYERS and deferred.intersection(_uses(graph, graph.op[name]))
    )


@dataclass(frozen=True)
class _Layers:
    """Facts of a graph's modules: the ops that one call runs, and the tensors that each holds."""

    calls: Counter[ModuleCall]
    tensors: Counter[str]


def _may_wait(graph: Graph, stage: Stage, layers: _Layers) -> tuple[str, ...]:
    """Return the parameters of which all uses in a stage are a layer's own weight or bias."""
    found: dict[str, bool] = {}
    for op in (graph.op[name] for name in stage.ops):
        is_layer = op.name in graph.graded and _is_layer(graph, op, layers)
        for name in _uses(graph, op):
            found[name] = is_layer and found.get(name, True)
    order = {param.canonical: i for i, param in reversed(list(enumerate(graph.params)))}
    waiting = {name for name, waits in found.items() if waits}
    return tuple(sorted(_with_partners(graph, stage, waiting), key=lambda name: order[name]))


def _with_partners(graph: Graph, stage: Stage, waiting: set[str]) -> set[str]:
    """Leave out a layer's tensors, and what shares them, where one of them may not wait."""
    layers = [set(_uses(graph, graph.op[name])) for name in stage.ops]
    layers = [names for names in layers if len(names) > 1]
    while True:
        kept = waiting - {n for names in layers if not names <= waiting for n in names}
        if kept == waiting:
            return waiting
        waiting = kept


def _is_layer(graph: Graph, op: Op, layers: _Layers) -> bool:
    """Whether an op is all that a layer of torch.nn runs, on its own tensors, all of them trained.

    The emitter writes such a layer as torch.nn's; anything else stays an op, whose gradients come
    with the backward.
    """
    if op.target not in LAYERS or not op.modules or op.kwargs or op.mutates:
        return False
    call = op.modules[-1]
    name = call.type.removeprefix(_TORCH).rpartition(".")[2]
    if not call.type.startswith(_TORCH) or name != LAYERS[op.target] or layers.calls[call] != 1:
        return False
    at = 0 if name == "Embedding" else 1
    bias = op.args[2] if name != "Embedding" and len(op.args) > 2 else None
    own = {ParamRef(f"{call.path}.weight"), *([bias] if bias is not None else [])}
    given = op.args[at] == ParamRef(f"{call.path}.weight")
    fits = given and bias in (None, ParamRef(f"{call.path}.bias"))
    if not fits or len(own) != len(op.params) or (len(op.args) > _SPARSE and _is_sparse(op)):
        return False
    specs = [graph.param[param].spec for param in op.params]
    dtypes = {spec.dtype for spec in specs}
    is_all = layers.tensors[call.path] == len(own)  # one that holds more is no layer of torch.nn's
    return is_all and all(s.requires_grad for s in specs) and len(dtypes) == 1 and dtypes <= _REAL


def _is_sparse(op: Op) -> bool:
    return LAYERS[op.target] == "Embedding" and bool(op.args[_SPARSE])


def _uses(graph: Graph, op: Op) -> Iterator[str]:
    """Yield the trained parameters that an op reads or writes; of an opaque module, all of it.

    By canonical name.
    """
    names = [*op.params, *(name for name in op.mutates if name in graph.param)]
    if op.target.startswith(_LEAF):
        path = op.target.removeprefix(_LEAF)
        names += [param.name for param in graph.params if param.name.startswith(f"{path}.")]
    for param in (graph.param[name] for name in names):
        if param.is_trained:
            yield param.canonical
