"""What of a model can be split inside its ops, and what that sends: `python -m tools.axes MODEL`.

MODEL is a model file or hf:config.json. Every axis that would be used is tried, then the sharded
graph is run beside the graph, in float32 and float64, for the given shares.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import axes, chosen_axes, priced_axes, ruleless
from bigbrain_fx.verification.sharding import ShardAgreement, agree, tried_axes


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of one model; return 1 when shards and graph differ by more than rounding."""
    options = _options(argv)
    file = load_model_file(options.model, seed=0)
    found = capture(file.model, file.example_batch, file.loss, autocast=file.autocast)
    every = priced_axes(found.graph, axes(found.graph))
    print("\n".join(_table(found.graph, every, most=options.most)))
    failed = False
    for shares in options.shares:
        kinds = tuple(options.axes.split(",")) if options.axes else ()
        chosen, whole = tried_axes(found.graph, chosen_axes(every, len(shares), kinds), shares)
        print(f"\nshares {':'.join(f'{share:g}' for share in shares)}")
        print("\n".join(_chosen(found.graph, chosen)))
        for (axis, op), why in whole.items():
            print(f"  {op} is kept whole on {axis}: {why}")
        rows = found.graph.static_batch or 4
        for exact, limit in ((False, 1e-5), (True, 1e-12)):
            result = agree(found, chosen, shares, rows=rows, exact=exact)
            print(f"  {_said(result, exact=exact)}")
            failed |= not result.gradients <= limit
    return int(failed)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.axes", description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model.py, or hf:config.json")
    parser.add_argument("--shares", type=_shares, nargs="+", default=[(2.0, 1.0), (3.0, 2.0, 1.0)])
    parser.add_argument("--axes", default="", help="kinds to choose from: heads,hidden,...")
    parser.add_argument("--most", type=int, default=24, help="rows of the table")
    return parser.parse_args(argv)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(":"))


def _table(graph: Graph, every: Iterable[Axis], most: int) -> Iterator[str]:
    """Yield a row for each kind of axis: those of alike layers in one."""
    total, held = _work(graph), _bytes(graph)
    yield f"{graph.name}: {len(graph.ops)} ops, {held} bytes of parameters"
    yield f"{'axis':38}{'parts':>6}{'work':>8}{'weights':>9}{'fwd bytes':>11}{'bwd bytes':>11}"
    alike: dict[tuple[object, ...], list[Axis]] = defaultdict(list)
    for axis in every:
        sent = axis.sent_bytes(backward=False), axis.sent_bytes(backward=True)
        alike[axis.kind, axis.size, axis.flops, axis.nbytes, *sent].append(axis)
    for same in itertools.islice(alike.values(), most):
        axis, times = same[0], f" x{len(same)}" if len(same) > 1 else ""
        sent = axis.sent_bytes(backward=False), axis.sent_bytes(backward=True)
        yield (
            f"{axis.name + times:38}{axis.size:6}{axis.flops / total:8.1%}{axis.nbytes / held:9.1%}"
            f"{sent[0]:11}{sent[1]:11}  {_whole(graph, axis)}"
        )
    without = ", ".join(f"{name} {count}" for name, count in sorted(ruleless(graph).items()))
    yield f"without a rule, kept whole: {without or 'none'}"


def _whole(graph: Graph, axis: Axis) -> str:
    """Say which ops need an axis whole."""
    counts = Counter(graph.op[name].target.split(".")[1] for name in axis.whole)
    return "whole: " + ", ".join(f"{name} {n}" for name, n in counts.items()) if counts else ""


def _chosen(graph: Graph, chosen: Sequence[Axis]) -> Iterator[str]:
    kinds = Counter(axis.kind for axis in chosen)
    forward = sum(axis.sent_bytes(backward=False) for axis in chosen)
    backward = sum(axis.sent_bytes(backward=True) for axis in chosen)
    yield f"  {', '.join(f'{n} {kind}' for kind, n in kinds.items()) or 'no axis'}"
    yield (
        f"  {sum(axis.flops for axis in chosen) / _work(graph):.1%} of the work and "
        f"{sum(axis.nbytes for axis in chosen) / _bytes(graph):.1%} of the weights are divided; "
        f"sums of {forward} bytes forward, {backward} backward"
    )


def _said(result: ShardAgreement, *, exact: bool) -> str:
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(result.exchanges.items()))
    return (
        f"{'float64' if exact else 'float32'}: loss {result.loss:.1e}, {result.compared} gradients "
        f"{result.gradients:.1e}, buffers {result.buffers:.1e} apart; {counts}; "
        f"held {' + '.join(map(str, result.held))}"
    )


def _work(graph: Graph) -> int:
    return max(1, sum(int(op.flops) for op in graph.at(graph.batch).ops))


def _bytes(graph: Graph) -> int:
    return max(1, sum(p.spec.nbytes for p in graph.params if p.name == p.canonical))


if __name__ == "__main__":
    raise SystemExit(main())
