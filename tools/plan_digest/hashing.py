"""Cases -> the hash of each plan less its texts, and its forecast step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from pydantic import TypeAdapter

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Plan, Source, make_plan
from tools.plan_digest.case_list import EVAL, Case, places

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 7
"""Of a number that are hashed: sums in another order differ in the sixteenth."""
LEFT_OUT = {"graph", "cluster", "source", "compared", "search", "format"}
TEXTS = {"reason"}
UNSAID = {"shard_group"}
"""Fields that came later: hashed where they say something, so that older hashes stay."""
GRAPH_TEXTS = {"source", "code", "lines", "statements"}


@dataclass(frozen=True)
class Digest:
    """Outcome of a case.

    Attributes:
        plan: a hash of all that is decided, and of all that is forecast; of a refusal, its class.
        step_s: of the forecast; None where nothing is planned.
        graph: a hash of the model's graph: where it differs, so may every plan.
    """

    plan: str
    step_s: float | None
    graph: str


def digests(wanted: Sequence[Case], processes: int = 1) -> Mapping[str, Digest]:
    """Plan every case; return digests by the cases' keys, in the order of the cases.

    Args:
        wanted: cases; those of one model follow each other.
        processes: that plan at once, a model each.
    """
    models = [list(own) for _, own in groupby(wanted, lambda case: case.model)]
    if processes == 1 or len(models) == 1:
        return {key: found for own in models for key, found in _of_model(own)}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return {key: found for own in pool.map(_of_model, models) for key, found in own}


def _of_model(wanted: Sequence[Case]) -> list[tuple[str, Digest]]:
    graph = _captured(wanted[0].model)
    later = {"inputs": {"__all__": {"varies"}}}  # a field of no graph here: the table is older
    as_json = TypeAdapter(Graph).dump_python(graph, mode="json", exclude=later)
    graph_hash = hashed(as_json, GRAPH_TEXTS)
    return [(case.key, _of_case(case, graph, graph_hash)) for case in wanted]


def _captured(model: str) -> Graph:
    name, is_eval, _ = model.partition(EVAL)
    path = ROOT / "models" / f"{name}.py"
    with capture_file(path, training=not is_eval) as session:
        return session.graph


def _of_case(case: Case, graph: Graph, graph_hash: str) -> Digest:
    try:
        plan = make_plan(graph, places()[case.cluster], Source(case.model), case.options)
    except BigBrainError as error:
        return Digest(type(error).__name__, None, graph_hash)
    return Digest(digest_of(plan), rounded(plan.forecast.step_s), graph_hash)


def digest_of(plan: Plan) -> str:
    """Return the hash of a plan less its texts, its model and its cluster.

    Of a search its bounds count; what else it tried is its story, not the plan.
    """
    data = TypeAdapter(Plan).dump_python(plan, mode="json", exclude=LEFT_OUT)
    bounds = plan.search.bounds if plan.search else ()
    return hashed({**data, "bounds": [bound.step_s for bound in bounds]}, TEXTS)


def hashed(data: object, without: Iterable[str]) -> str:
    """Return a short hash of JSON without some keys, numbers rounded."""
    plain = _plain(data, frozenset(without))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rounded(number: float) -> float:
    """Return a number to as many digits as are hashed."""
    return float(f"{number:.{DIGITS - 1}e}")


def _plain(data: object, without: frozenset[str]) -> object:
    if isinstance(data, dict):
        kept = {k: v for k, v in data.items() if k not in without and (v or k not in UNSAID)}
        return {k: _plain(value, without) for k, value in kept.items()}
    if isinstance(data, list | tuple):
        return [_plain(value, without) for value in data]
    return rounded(data) if isinstance(data, float) else data
