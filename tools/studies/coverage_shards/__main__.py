"""Every model of the zoo divided inside its ops: the sharded graph beside the graph.

    python -m tools.studies.coverage_shards [--case NAME ...] [--out FILE] [--write results.md]

For two members with shares 2:1 and three with 3:2:1: the axes that `split --tensor` would choose,
every rule tried first, then one forward and backward whole and in shares, in float32 and float64;
and the same once more with what these axes leave of the sequence. A case runs in a process of its
own under a deadline. Statuses:

    equal      losses, gradients and buffers to 1e-5 of the largest, in float64 to 1e-12; where a
               model's own rounding is coarse (autocast), to three times that
    whole      no axis is found
    refused    the model itself is, as in docs/reference/coverage.md
    failed     anything else: a wrong rule
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigbrain_fx.core import Axis
from tools.conformance.coverage import in_a_process, warm
from tools.conformance.zoo import Case, cases, find

if TYPE_CHECKING:
    from bigbrain_fx.frontend import Captured

SHARES = ((2.0, 1.0), (3.0, 2.0, 1.0))
LIMITS = {"float32": 1e-5, "float64": 1e-12}
DEADLINE_S = 300.0
NOTES = {
    "nystromformer": "Of 4 heads a member has one, and torch 2.13's convolution of one channel "
    "(oneDNN, a kernel of 65 over 16 places) writes beyond its memory, in plain PyTorch as well; "
    "`split` names it, and the axes without it."
}
"""What is known of a case that is not equal."""
_AS_NEAR = 3.0  # times a model's own distance from float64, as `verify` allows
STATUSES = ("equal", "whole", "refused", "failed")
HEADING = """# Models divided inside their ops

Written by `python -m tools.studies.coverage_shards --out FILE --write results.md`: one training
step's forward and backward of every model of the zoo (docs/reference/coverage.md), whole and
divided among unlike members, along the axes that `split --tensor` chooses, and with what they leave
of the sequence, which it takes where that is faster. Apart is the largest difference of a gradient,
of its largest number (or of a hundredth of the largest of all). {summary}

| model | shares | axes | work divided | gradients | apart, float32 | apart, float64 |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Shared:
    """What became of a model with some shares.

    Attributes:
        axes: how many of each kind are divided.
        work: the share of the floating point operations that is divided.
        compared: how many gradients were compared, of all members.
        apart: by type, the largest difference of a loss, gradient or buffer.
        rounding: of the model itself, undivided, in its own types; 0: it was not asked.
        left: ops that their trial left whole, each with why.
    """

    axes: Mapping[str, int]
    work: float = 0.0
    compared: int = 0
    apart: Mapping[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    left: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """One model: its status, why, and what became of it by shares ("2:1")."""

    case: str
    family: str
    status: str
    detail: str = ""
    shared: Mapping[str, Shared] = field(default_factory=dict)


def run_case(case: Case, deadline_s: float) -> Row:
    """Divide one model in a forked process; whatever happens to that process, return a row."""
    found = in_a_process(_examine, case, deadline_s)
    shared = {key: Shared(**each) for key, each in found.pop("shared", {}).items()}
    return Row(case.name, case.family, shared=shared, **found)


def _examine(case: Case) -> dict[str, object]:
    from bigbrain_fx.errors import CaptureError, InputError
    from tools.conformance.coverage_case import Bench

    with tempfile.TemporaryDirectory(prefix=f"shards-{case.name}-") as scratch:
        try:
            bench = Bench.of(case, Path(scratch))
            shared = dict(_in_shares(bench.captured))
        except (CaptureError, InputError) as error:
            return {"status": "refused", "detail": str(error)}
        except Exception as error:
            return {"status": "failed", "detail": f"{type(error).__name__}: {error}"}
    return {**_judged(shared), "shared": {key: asdict(each) for key, each in shared.items()}}


def _judged(shared: Mapping[str, Shared]) -> dict[str, object]:
    if not any(each.axes for each in shared.values()):
        return {"status": "whole"}
    far = [
        f"{key}, {kind}: {apart:.1e}"
        for key, each in shared.items()
        for kind, apart in each.apart.items()
        if not apart <= max(LIMITS[kind], _AS_NEAR * each.rounding * (kind == "float32"))
    ]
    return {"status": "failed" if far else "equal", "detail": "; ".join(far)}


def _in_shares(captured: object) -> Iterator[tuple[str, Shared]]:
    """Yield what becomes of it for each shares: as it is, and with what is left of the sequence."""
    from bigbrain_fx.frontend import Captured
    from bigbrain_fx.plan import axes, chosen_axes, priced_axes
    from bigbrain_fx.plan.tensor.asked import with_sequence

    assert isinstance(captured, Captured)
    every = priced_axes(captured.graph, axes(captured.graph))
    for shares in SHARES:
        chosen = chosen_axes(every, len(shares), ())
        yield _text(shares), _divided(captured, chosen, shares)
        more = with_sequence(captured.graph, every, chosen, len(shares))
        if len(more) > len(chosen):
            yield f"{_text(shares)}, sequence", _divided(captured, more, shares)


def _divided(captured: Captured, wanted: Sequence[Axis], shares: Sequence[float]) -> Shared:
    from bigbrain_fx.verification.sharding import agree, own_rounding, tried_axes

    graph = captured.graph
    chosen, whole = tried_axes(graph, wanted, shares)
    if not chosen:
        return Shared({})
    apart, compared = dict[str, float](), 0
    for kind in LIMITS:
        found = agree(captured, chosen, shares, rows=graph.static_batch, exact=kind == "float64")
        apart[kind] = max(found.loss, found.gradients, found.buffers)
        compared = found.compared
    is_far = LIMITS["float32"] < apart["float32"] < math.inf
    own = own_rounding(captured, graph.static_batch) if is_far else 0.0
    total = max(1, sum(int(op.flops) for op in graph.at(graph.batch).ops))
    return Shared(
        dict(Counter(axis.kind for axis in chosen)),
        sum(axis.flops for axis in chosen) / total,
        compared,
        apart,
        own,
        [f"{op} on {axis}: {why}" for (axis, op), why in whole.items()],
    )


def _text(shares: Sequence[float]) -> str:
    return ":".join(f"{share:g}" for share in shares)


# --------------------------------------------------------------------------- the page


def page(found: Sequence[Row]) -> str:
    """Return the page of all rows."""
    lines = [line for row in found for line in _lines(row)]
    others = [f"- {row.case}: {row.status}. {_why(row)}" for row in _others(found)]
    tail = ["", "## Not divided", "", *others] if others else []
    return HEADING.format(summary=summary(found)) + "\n".join([*lines, *tail]) + "\n"


def summary(found: Sequence[Row]) -> str:
    """Say in a sentence how many models are what."""
    counts = Counter(row.status for row in found)
    said = ", ".join(
        f"{counts[status]} {status}" for status in ("equal", "whole", "refused", "failed")
    )
    tried = [each for row in found for each in row.shared.values() if each.axes]
    most = {kind: max((each.apart[kind] for each in tried), default=0.0) for kind in LIMITS}
    number = sum(each.compared for each in tried)
    return (
        f"{len(found)} models: {said}; {number} gradients compared, at most "
        f"{most['float32']:.1e} apart in float32, {most['float64']:.1e} in float64."
    )


def _lines(row: Row) -> Iterator[str]:
    for key, each in row.shared.items():
        if each.axes:
            kinds = ", ".join(f"{count} {kind}" for kind, count in each.axes.items())
            apart = " | ".join(f"{each.apart[kind]:.1e}" for kind in LIMITS)
            yield f"| {row.case} | {key} | {kinds} | {each.work:.0%} | {each.compared} | {apart} |"


def _others(found: Iterable[Row]) -> Iterator[Row]:
    return (row for row in found if row.status != "equal")


def _why(row: Row) -> str:
    return " ".join(filter(None, (_first(row.detail), NOTES.get(row.case, ""))))


def _first(detail: str) -> str:
    return (detail.splitlines() or [""])[0][:200]


def _former(path: Path | None) -> dict[str, Row]:
    if path is None or not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row in rows:
        row["shared"] = {key: Shared(**each) for key, each in row["shared"].items()}
    return {row["case"]: Row(**row) for row in rows}


@click.command()
@click.option("--case", "names", multiple=True, help="This case only; more than once for more.")
@click.option("--half", type=click.Choice(["0", "1"]), help="Every other case: for two processes.")
@click.option("--out", type=click.Path(path_type=Path), help="Skip its cases; add to it.")
@click.option("--write", type=click.Path(path_type=Path), help="The page.")
@click.option("--deadline", default=DEADLINE_S, show_default=True, help="Seconds for a case.")
def main(
    names: tuple[str, ...],
    half: str | None,
    out: Path | None,
    write: Path | None,
    deadline: float,
) -> None:
    """Divide the models; exit code 1 where one is not equal."""
    warm()
    wanted = [find(name) for name in names] or list(cases())
    wanted = wanted if half is None else wanted[int(half) :: 2]
    done, found = _former(out), []
    for case in wanted:
        row = done.get(case.name) or run_case(case, deadline)
        found.append(row)
        if out is not None and case.name not in done:
            with out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        click.echo(f"{row.case:24} {row.family:12} {row.status:8} {_first(row.detail)}")
    click.echo(summary(found))
    if write is not None:
        write.write_text(page(found))
    sys.exit(1 if any(row.status == "failed" for row in found) else 0)


if __name__ == "__main__":
    main()
