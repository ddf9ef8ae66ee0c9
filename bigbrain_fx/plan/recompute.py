"""Stages -> Stages of which some run again: they keep no activations and pay by a second forward.

What is made again of single ops is chosen by `plan.lightening`; here it is only asked for and said.

It knows graph and stages; it knows nothing of time, memory or schedules, and chooses no stage.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a whole stage as
the segment, as GPipe does (Huang et al., 2019, section 2.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

from bigbrain_fx.core import Graph, Stage, Stages
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
    if text is None:
        return None
    if text == "none":
        return ()
    if text in ("all", "ops", "auto"):
        return text  # type: ignore[return-value]  # one of these three
    return read_stages(text, "--activation-checkpointing", "auto, ops, all, none")


def read_stages(text: str, flag: str, words: str) -> tuple[int, ...]:
    """Read "0,2", where an option takes some words or the numbers of stages."""
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
    known = frozenset(trained)
    asked = () if isinstance(wanted, str) else wanted or ()
    numbers = known if wanted == "all" else frozenset(asked)
    if lenient:
        numbers &= known
    require_trained(stages, numbers, known, "--activation-checkpointing", "to recompute for")
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
    numbers = ", ".join(map(str, stages.recompute))
    which = f"stage {numbers}" if len(stages.recompute) == 1 else f"stages {numbers}"
    return f"recompute: each backward runs the forward of {which} again" if numbers else ""


def require_trained(
    stages: Stages, numbers: frozenset[int], known: frozenset[int], flag: str, what: str
) -> None:
    """Refuse numbers that are no stages with a backward."""
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
