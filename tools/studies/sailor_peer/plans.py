"""A plan of ours -> replicas in their words, and a plan of theirs -> ours, placed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbrain_fx.core import Cluster, Graph, Stage
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tools.studies.sailor_peer.clusters import THEIRS, zone_of
from tools.studies.sailor_peer.peer import Pipeline, micro_batches

_EMBEDDING = ("tokens", "positions")


def in_their_words(plan: Plan) -> list[Pipeline]:
    """Return each replica; a layer that a cut divides is of the stage that has most of its work."""
    layer_of = _layers(plan.graph)
    return [
        _pipeline(plan, layer_of, [s for s in plan.stages.stages if s.replica == replica])
        for replica in range(plan.stages.replicas)
    ]


def _pipeline(plan: Plan, layer_of: Mapping[str, int], stages: Sequence[Stage]) -> Pipeline:
    firsts, one_row = [stage for stage in stages if stage.member == 0], plan.graph.at(1)
    work: dict[int, Counter[int]] = {}
    for place, stage in enumerate(firsts):
        for op in set(stage.ops) & layer_of.keys():
            flops = 1 + int(one_row.op[op].flops)
            work.setdefault(layer_of[op], Counter())[place] += flops
    owner = {layer: counts.most_common(1)[0][0] for layer, counts in work.items()}
    layers = [tuple(n for n in sorted(owner) if owner[n] == i) for i in range(len(firsts))]
    used = [(stage, own) for stage, own in zip(firsts, layers, strict=True) if own]
    cards = [plan.cluster.device[stage.device] for stage, _ in used]
    return Pipeline(
        tuple(own for _, own in used),
        tuple((THEIRS[str(c.preset)], zone_of(plan.cluster, c.name)) for c in cards),
        (plan.stages.members,) * len(used),
        len(plan.stages.micros_of(firsts[0].index, plan.micro_batches)),
    )


def _layers(graph: Graph) -> dict[str, int]:
    """Return the layer of each op as they number them: embedding, blocks, head and loss."""
    paths = {op.name: op.modules[-1].path if op.modules else "" for op in graph.ops}
    blocks = {path.split(".")[1] for path in paths.values() if path.startswith("blocks.")}
    last = 1 + len(blocks)

    def layer(path: str) -> int:
        head, _, rest = path.partition(".")
        if head == "blocks":
            return 1 + int(rest.partition(".")[0])
        return 0 if head in _EMBEDDING else last

    return {name: layer(path) for name, path in paths.items()}


def planned(
    graph: Graph, cluster: Cluster, theirs: Mapping[str, Any], profile: Path
) -> Plan | None:
    """Plan theirs as our forecasts see it; None: of several stages, or groups of unlike sizes."""
    pipeline = theirs["pipeline_list"][0]
    degrees = {degree for stage in pipeline["tmp_per_stage"] for _, degree in stage}
    if len(degrees) > 1 or len(pipeline["dp"]) > 1:
        return None
    members, count = min(degrees), pipeline["dp"][0]
    options = Options(
        "naive",
        f"layers:{profile}",
        micro_batches=count * micro_batches(theirs, graph.batch),
        replicas=count,
        sum_order="backend",
        tensor=members if members > 1 else None,
    )
    sets = _devices(cluster, pipeline)
    return make_plan(graph, replace(cluster, replicas=sets), Source(""), options)


def _devices(cluster: Cluster, pipeline: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Give each place of theirs devices of its card and zone, host after host."""
    free: dict[tuple[str, str], list[str]] = {}
    for name, device in cluster.device.items():
        free.setdefault((THEIRS[str(device.preset)], zone_of(cluster, name)), []).append(name)
    found: list[list[str]] = [[] for _ in range(pipeline["dp"][0])]
    for stage in pipeline["tmp_per_stage"]:
        for own, (((card, _, zone),), degree) in zip(found, stage, strict=True):
            own += [free[card, zone].pop(0) for _ in range(degree)]
    return tuple(map(tuple, found))
