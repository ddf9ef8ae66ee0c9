"""Options that do not go together, or not with the model: refused before anything is planned.

What options alone show is refused before a model is captured, which may take minutes. It knows what
was asked for; each rule is of the part that it is about, and how ops are placed changes none.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.asynchronous import require_asynchronous, require_asynchronous_options
from bigbrain_fx.plan.compiling import require_compilable, require_compilable_options
from bigbrain_fx.plan.conflicts import require_backwards
from bigbrain_fx.plan.fold import FOLDS, require_free, require_pieces
from bigbrain_fx.plan.layer_by_layer import layer_by_layer
from bigbrain_fx.plan.nouns import AUTO, Options, Source
from bigbrain_fx.plan.offloading import require_stores
from bigbrain_fx.plan.quantising import require_quantisable
from bigbrain_fx.plan.replicas import require_mirror_options, require_replica_options, wants_mirror
from bigbrain_fx.plan.tensor import wants_tensor
from bigbrain_fx.planning import label, options_of


def require_options(cluster: Cluster, options: Options, *, placed: bool = False) -> None:
    """Refuse what is wrong whatever the model is.

    Args:
        cluster: where it runs.
        options: what was chosen.
        placed: ops are placed as another plan has them, so no partitioner chooses anything.

    Raises:
        InputError: options that do not go together; says what to do.
    """
    options = _without_partitioner(options) if placed else options
    trains = options.mode != "eval"
    if not placed:
        _require_cuts(options)
    require_backwards(options, trains=trains)
    require_asynchronous_options(cluster, options)
    require_compilable_options(options)
    require_quantisable(options)
    _require_stores(cluster, options, trains=trains)
    layer_by_layer(options, cluster)
    if wants_mirror(options):
        require_mirror_options(options)
        return
    require_pieces(options.schedule, options.pieces)
    if options.schedule in FOLDS:
        require_free(options.schedule or "", bool(options.pins or options.place))
    if not placed:
        require_replica_options(cluster, options, trains=trains)


def require_agreeing(
    graph: Graph, cluster: Cluster, source: Source, options: Options, *, placed: bool = False
) -> Options:
    """Refuse what is wrong with this model however it is cut; return all that is implied.

    Raises:
        InputError: something was asked for that does not go with something else.
    """
    require_options(cluster, options, placed=placed)
    require_backwards(options, trains=graph.training)
    require_asynchronous(graph, source, options)
    require_compilable(graph, source, options)
    _require_stores(cluster, options, trains=graph.training)
    return layer_by_layer(options, cluster, source)


def _without_partitioner(options: Options) -> Options:
    return replace(options, partitioner=Options().partitioner, cut_at=None)


def _require_stores(cluster: Cluster, options: Options, *, trains: bool) -> None:
    require_stores(
        options.offload,
        cluster,
        trains=trains,
        groups=wants_tensor(options),
        zero_stage=options.zero_stage,
    )


def _require_cuts(options: Options) -> None:
    """Raise InputError where --cut-at is given and others say where a line is cut."""
    if options.cut_at is None:
        return
    if options.schedule in FOLDS:
        raise InputError(
            f"schedule '{options.schedule}' cuts the line itself, wherever devices are busy alike",
            code="BX1200",
            at="--cut-at",
            help="leave --cut-at out, or use --schedule 1f1b, gpipe or list",
        )
    known = options.partitioner == AUTO or "block_gap" in options_of(
        "partitioner", options.partitioner
    )
    if options.place or not known:
        whose = "--place" if options.place else f"partitioner '{label(options.partitioner)}'"
        raise InputError(
            f"{whose} says where each op goes, and knows nothing of --cut-at",
            code="BX1201",
            at="--cut-at",
            help="leave --cut-at out, or use --partitioner analytical or auto",
        )
