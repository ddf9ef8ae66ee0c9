"""The rows of a micro-batch are searched: down to one, where more do not fit or take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.fastest import fastest_number
from bigbrain_fx.plan.one import counts, more_counts
from tests.support.synthetic import chain_graph, cluster_of, device

MIB = 2**20
ROWS = 256


def wide(rows: int = ROWS) -> Graph:
    """Four layers whose activations take 1 MiB a row: all rows of a step take 256 MiB each."""
    graph = chain_graph(1, 4, skips=False)
    ops = tuple(
        replace(
            op,
            outputs=(replace(op.outputs[0], shape=("B", 1 << 18)),),
            flops=f"{1 << 20}*B",
            writes_bytes=f"{1 << 20}*B",
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, batch=rows)


def one_device(memory_bytes: int, count: int = 1) -> Cluster:
    devices = (device(f"d{i}", 100, memory_bytes) for i in range(count))
    return cluster_of(*devices, link=Link(1e-5, 1e12))


def test_further_numbers_have_half_the_rows_each() -> None:
    graph, options = wide(48), Options()
    assert counts(graph, one_device(1, 3), options) == [1, 2, 3, 4, 6, 8, 12]
    assert list(more_counts(graph, options, 12)) == [24, 48]
    assert list(more_counts(replace(graph, batch=45), options, 9)) == [45]
    assert list(more_counts(graph, replace(options, micro_batches=12), 12)) == []
    assert list(more_counts(replace(graph, static_batch=4), options, 12)) == []


@pytest.mark.parametrize("partitioner", ["naive", "chain-dp", "auto"])
def test_a_batch_of_many_rows_fits_with_few_rows_a_micro_batch(partitioner: str) -> None:
    options = Options(partitioner, tensor=1)
    plan = make_plan(wide(), one_device(100 * MIB), Source("m.py"), options)
    assert plan.rows < ROWS // 8
    assert plan.micro_batches * plan.rows == ROWS
    asked = replace(options, micro_batches=8)
    with pytest.raises(NoPlanError):
        make_plan(wide(), one_device(100 * MIB), Source("m.py"), asked)


@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_replicas_have_as_few_rows(partitioner: str) -> None:
    options = Options(partitioner, replicas=2, tensor=1)
    plan = make_plan(wide(), one_device(100 * MIB, 2), Source("m.py"), options)
    assert plan.stages.replicas == 2
    assert plan.rows < ROWS // 8


@pytest.mark.gate("options1")
@pytest.mark.parametrize("options", [Options("chain-dp"), Options("auto", sum_order="backend")])
def test_a_number_of_replicas_that_divides_no_batch_goes(options: Options) -> None:
    """14 replicas share 1,024 rows, which no number of equal shares does."""
    devices = one_device(100 * MIB, 14)
    plan = make_plan(wide(1024), devices, Source("m.py"), replace(options, replicas=14, tensor=1))
    each = [len(replica.micros) for replica in plan.placement.replicas]
    assert sum(each) * plan.rows == 1024
    assert len(each) == 14
    assert max(each) - min(each) <= 1
    shares = replace(options, replica_shares=(1,) * 14, tensor=1)
    with pytest.raises(InputError) as caught:
        make_plan(wide(1024), devices, Source("m.py"), shares)
    assert "--replicas 14" in (caught.value.help or "")


def test_no_further_number_is_tried_but_where_the_last_is_best() -> None:
    plan = make_plan(wide(8), one_device(1 << 34), Source("m.py"), Options(micro_batches=1))
    steps_s = {1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5, 16: 0.1}
    tried = []

    def make(count: int) -> object:
        tried.append(count)
        forecast = replace(plan.forecast, step_s=steps_s[count])
        return replace(plan, micro_batches=count, forecast=forecast)

    best = fastest_number([1, 2], [4, 8, 16], make, but=(NoPlanError,))  # type: ignore[arg-type]
    assert (best.micro_batches, tried) == (4, [1, 2, 4, 8])
    tried.clear()
    best = fastest_number([4, 8], [16], make, but=(NoPlanError,))  # type: ignore[arg-type]
    assert (best.micro_batches, tried) == (4, [4, 8])
