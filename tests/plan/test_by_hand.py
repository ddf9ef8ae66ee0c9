"""A placement by hand: pins hold, a file goes out and comes back as it was, names are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import Cluster, Graph, ModuleCall, Placement
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan, Source, make_plan, plan_placed, write_placement
from bigbrain_fx.plan.by_hand import homes_of, read_pins
from tests.plan.test_remedy import one_device, wide
from tests.support.messages import refused
from tests.support.synthetic import chain_graph, cluster_of, device

MIB = 2**20
PATHS = ("embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "", "head")


def graph_of_blocks() -> Graph:
    """Seven layers in a row, in modules; the last but one is in none."""
    graph = chain_graph(3, len(PATHS), skips=False)
    ops = tuple(
        replace(op, modules=(ModuleCall(path, "Module", 0),) if path else ())
        for op, path in zip(graph.ops, PATHS, strict=True)
    )
    return replace(graph, ops=ops)


GRAPH = graph_of_blocks()
CLUSTER = cluster_of(device("d0"), device("d1"))


def planned(cluster: Cluster = CLUSTER, place: Path | None = None, *pins: str) -> Plan:
    options = Options(micro_batches=1, pins=read_pins(pins), place=str(place) if place else None)
    return make_plan(GRAPH, cluster, Source("model.py"), options)


def homes(plan: Plan) -> str:
    device_of = {op: stage.device for stage in plan.stages.stages for op in stage.ops}
    return " ".join(device_of[op.name] for op in GRAPH.ops)


def test_pinned_modules_stay_and_others_are_placed_around_them() -> None:
    assert homes(planned(CLUSTER, None, "blocks.0-1=d1")).split()[1:5] == ["d1"] * 4
    assert homes(planned(CLUSTER, None, "blocks=d0", "blocks.1.down=d1")).split()[1:5] == [
        *["d0"] * 3,
        "d1",
    ]


def test_a_file_goes_out_and_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = planned(CLUSTER, None, "embed=d1", "blocks.0.up=d1", "blocks.0.down=d0", "head=d1")
    file = tmp_path / "placement.json"
    write_placement(plan, file)
    again = planned(CLUSTER, file)
    assert (again.stages, again.forecast) == (plan.stages, plan.forecast)
    told = json.loads(file.read_text())
    assert told["format"] == 1
    assert told["modules"]["blocks.0.down"] == "d0"
    assert list(told["ops"]) == [GRAPH.ops[5].name]
    told["modules"]["head"] = "d0"
    file.write_text(json.dumps(told))
    assert homes(planned(CLUSTER, file)).split()[-1] == "d0"
    assert homes(planned(CLUSTER, file, "head=d1")).split()[-1] == "d1"
    with pytest.raises(InputError, match="exists already"):
        write_placement(plan, file)


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("blocks.0", "expected MODULES=DEVICE"),
        ("=d0", "expected MODULES=DEVICE"),
        ("blocks.0-5=d0", "there is no module 'blocks.2'"),
        ("blocks.1-0=d0", "1 is above 0"),
        ("blcks.0=d0", r"no module 'blcks.0'[\s\S]*did you mean blocks.0"),
        ("head=gpu", r"no device 'gpu'[\s\S]*there are d0, d1"),
    ],
)
def test_a_pin_of_what_is_not_there(pin: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        homes_of(GRAPH, CLUSTER, read_pins([pin]))
    assert caught.match(said)


def test_two_pins_may_not_disagree() -> None:
    with pytest.raises(InputError, match=r"blocks.0 is to be on d0 and on d1"):
        homes_of(GRAPH, CLUSTER, [("blocks.0-1", "d0"), ("blocks.0", "d1")])


def test_a_device_without_room_is_told_with_the_arithmetic() -> None:
    small = cluster_of(device("d0"), device("d1", memory_bytes=40 * MIB + 2000))
    with pytest.raises(NoPlanError, match=r"d1 needs .* has 40.0 MiB") as caught:
        planned(small, None, "blocks=d1")
    assert "placed by hand: blocks=d1" in caught.value.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "no placement: Input should be a valid dictionary"),
        ('{"format": 2}', "(?s)Input should be 1.*placement.json: format"),
        ('{"format": 1}', "places nothing"),
        ('{"format": 1, "modules": {"head": "d0", "head": "d1"}}', "'head' is there twice"),
        ('{"format": 1, "modules": {"head": "d0"}, "modules": {}}', "'modules' is there twice"),
        ('{"format": 1, "model": "other", "modules": {"head": "d0"}}', "of model 'other'"),
        ('{"format": 1, "module": {}}', "(?s)not permitted.*placement.json: module"),
        ('{"format": 1, "modules": {"head": 0}}', "(?s)valid string.*modules.head"),
        ('{"format": 1, "modules": {"heat": "d0"}}', "no module 'heat'"),
        ('{"format": 1, "ops": {"v99": "d0"}}', "no op 'v99'"),
        ('{"format": 1, "ops": {"v0": "d9"}}', "no device 'd9'"),
    ],
)
def test_a_file_that_is_no_placement(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "placement.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        planned(CLUSTER, file)
    assert caught.match(said)


FOUR = cluster_of(*(device(f"d{i}") for i in range(4)))


def replicated(cluster: Cluster = FOUR, **choices: object) -> Plan:
    options = Options(**{"replicas": 2, "micro_batches": 2, "schedule": "list", **choices})  # type: ignore[arg-type]
    return make_plan(replace(GRAPH, batch=4), cluster, Source("m.py"), options)


def homes_of_replicas(plan: Plan) -> list[list[str]]:
    stages = [plan.stages.of_replica(number) for number in range(plan.stages.replicas)]
    device_of = [{op: stage.device for stage in own for op in stage.ops} for own in stages]
    return [[own[op.name] for op in GRAPH.ops] for own in device_of]


def test_replicas_are_placed_as_one_is(tmp_path: Path) -> None:
    """Each device stands for those at its place in the others; the file names one replica's."""
    pins = (("embed", "d1"), ("blocks", "d0"), ("head", "d1"))
    plan = replicated(pins=pins)
    one, other = homes_of_replicas(plan)
    assert one[:5] == ["d1", *["d0"] * 4]
    assert other == [{"d0": "d2", "d1": "d3"}[name] for name in one]
    assert json.loads(_written(plan, tmp_path))["devices"] == ["d1", "d0"]
    again = replicated(place=str(tmp_path / "whole.json"))
    assert (again.stages, again.forecast) == (plan.stages, plan.forecast)
    named = replace(FOUR, replicas=(("d0", "d3"), ("d1", "d2")))
    pins = (("embed", "d3"), ("blocks", "d0"), ("head", "d3"))
    assert homes_of_replicas(replicated(named, pins=pins))[1][:2] == ["d2", "d1"]


def test_devices_that_no_replica_has_together_are_one() -> None:
    pins = (("embed", "d0"), ("blocks", "d3"), ("head", "d0"))
    assert {*homes_of_replicas(replicated(pins=pins))[1]} == {"d1", "d2"}
    named = replace(FOUR, replicas=(("d0", "d1"), ("d2", "d3")))
    with refused("BX1242"):
        replicated(named, pins=pins)
    with refused("BX1242"):  # no place in the replica of one device
        replicated(cluster_of(*FOUR.devices[:3]), pins=(("blocks", "d0"), ("head", "d1")))


def test_a_placement_that_is_given_has_as_few_rows_as_fit() -> None:
    """Numbers that do not fit are not the end: others are tried."""
    graph = wide(64)
    placement = Placement({op.name: "d0" for op in graph.ops}, "given")
    plan = plan_placed(graph, one_device(100 * MIB), Source("m.py"), Options(), placement)
    assert 64 // plan.micro_batches == plan.rows < 32


def test_an_op_that_every_reader_makes_for_itself_has_a_place_too(tmp_path: Path) -> None:
    plan = planned()
    last = plan.stages.stages[-1]
    alone = replace(last, recomputed=(last.ops[-1],))
    stages = replace(plan.stages, stages=(*plan.stages.stages[:-1], alone))
    write_placement(replace(plan, stages=stages), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_text() == _written(plan, tmp_path)


def _written(plan: Plan, folder: Path) -> str:
    write_placement(plan, folder / "whole.json")
    return (folder / "whole.json").read_text()
