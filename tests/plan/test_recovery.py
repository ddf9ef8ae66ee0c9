"""Snapshots and failures, devices that come and go: closed forms by hand."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from bigbrain_fx.cli import cli
from bigbrain_fx.cli.running import intervals
from bigbrain_fx.core import Cluster, Device, Period, Send
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import (
    Options,
    OverTime,
    Plan,
    Source,
    make_plan,
    over_time,
    read_plan,
    to_json,
)
from bigbrain_fx.plan.explanation import explain
from bigbrain_fx.plan.recovery import (
    COPY_SHARE,
    MOST_STEPS,
    Assumptions,
    DeviceRecovery,
    Recovery,
    choose,
    closed_form,
    interval,
    restart_all,
)
from tests.plan.test_remedy import wide
from tests.support.bundles import split_small
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device

MIB = 2**20


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return read_plan(split_small(tmp_path_factory.mktemp("recovery")))


def recovery(replay_s: float = 2.0, devices: int = 1, **assumptions: float) -> Recovery:
    each = tuple(
        DeviceRecovery(f"d{n}", 100 * MIB, 10 * MIB, 10, 0.05, 100 * MIB, replay_s)
        for n in range(devices)
    )
    return Recovery(each, 0.5, 200, 1.0, 0.01, Assumptions(3600.0, **assumptions))


# --------------------------------------------------------------------------- how often


def test_copying_takes_at_most_its_share_of_a_step() -> None:
    assert interval(0.1, 0.5, 10**6) == 20


def test_no_snapshot_is_taken_of_what_a_peer_has(plan: Plan) -> None:
    stages = dataclasses.replace(plan.stages, micros=((0, 1), (2, 3)))
    copies = dataclasses.replace(plan, stages=stages)
    found = choose(copies, Assumptions(mtbf_s=3600.0))
    assert found.overhead == 0.0
    assert {device.snapshot_every for device in found.devices} == {1}
    assert "MiB from a peer" in str(found)
    asked = {"snapshot_every": None, "commit_every": None, "commits": None}
    assert intervals(copies, "1h", asked)["snapshot_every"] is None
    elastic = intervals(copies, "1h", {**asked, "elastic": True})
    assert elastic["snapshot_every"] == 1
    zero = dataclasses.replace(plan, stages=dataclasses.replace(stages, zero_stage=1))
    assert choose(zero).overhead == choose(plan).overhead > 0


def test_rare_failures_ask_for_fewer_copies(plan: Plan) -> None:
    often, rare = (choose(plan, Assumptions(mtbf_s=mtbf_s)) for mtbf_s in (0.01, 1e9))
    assert often.devices[0].snapshot_every == choose(plan).devices[0].snapshot_every
    assert rare.devices[0].snapshot_every > often.devices[0].snapshot_every
    assert max(d.replay_s for d in rare.devices) <= 1.0
    assert rare.overhead < often.overhead


def test_a_quick_copy_is_made_every_step() -> None:
    assert interval(0.001, 1.0, 10**6) == 1


def test_the_log_fits_where_it_is_kept() -> None:
    assert interval(0.1, 0.5, 3) == 3
    assert interval(0.1, 0.5, 0) == 1


@given(st.floats(1e-6, 100), st.floats(1e-6, 100), st.integers(0, 10**6))
def test_an_interval_keeps_its_limits(copy_s: float, step_s: float, most: int) -> None:
    every = interval(copy_s, step_s, most)
    assert 1 <= every <= MOST_STEPS
    assert every == 1 or every <= most
    if most >= MOST_STEPS and copy_s < MOST_STEPS * COPY_SHARE * step_s:
        assert copy_s / every <= 1.0001 * COPY_SHARE * step_s


def test_commits_follow_young() -> None:
    found = recovery()
    wanted_s = sqrt(2 * 1.0 * 3600.0 / 0.1)
    assert wanted_s == pytest.approx(268.3, abs=0.1)
    assert found.assumptions.host_share == 0.1


def test_a_plans_logs_are_its_messages(plan: Plan) -> None:
    found = choose(plan, Assumptions(mtbf_s=3600.0))
    sent = {name: 0 for name in plan.stages.devices}
    for program in plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                target = plan.stages.stages[instruction.edge.target].device
                sent[target] += instruction.edge.nbytes
    assert {d.device: d.log_bytes_per_step for d in found.devices} == sent
    assert all(nbytes > 0 for nbytes in sent.values())
    assert all(d.log_bytes == d.snapshot_every * sent[d.device] for d in found.devices)
    assert len({d.snapshot_every for d in found.devices}) == 1
    assert found.commit_every is not None
    young_s = sqrt(2 * found.commit_s * 3600.0 / 0.1)
    assert found.commit_every == pytest.approx(young_s / found.step_s, abs=1)


def test_without_an_mtbf_nothing_is_committed(plan: Plan) -> None:
    assert choose(plan).commit_every is None


def test_explain_says_what_a_death_costs(plan: Plan) -> None:
    found = explain(plan)
    assert found.recovery == choose(plan)
    assert "its senders keep up to" in str(found)


# --------------------------------------------------------------------------- what is lost


@pytest.mark.parametrize(("mtbf_s", "lost"), [(60.0, 0.0898), (600.0, 0.01813), (6000.0, 0.01072)])
def test_deaths_of_one_device_take_what_a_trial_lost(mtbf_s: float, lost: float) -> None:
    """Trials of 20,000 failures drawn at random, event by event, at f2e9a559."""
    alone = dataclasses.replace(recovery(replay_s=8.0), commit_every=None)
    assert 1 - closed_form(alone, mtbf_s) == pytest.approx(lost, rel=0.01)


@pytest.mark.parametrize(("mtbf_s", "lost"), [(300.0, 0.2077), (3000.0, 0.03133)])
def test_lost_hosts_take_what_a_trial_lost(mtbf_s: float, lost: float) -> None:
    assert 1 - closed_form(recovery(host_share=1.0), mtbf_s) == pytest.approx(lost, rel=0.01)


def test_both_kinds_together_take_what_a_trial_lost() -> None:
    assert 1 - closed_form(recovery(devices=4), 600.0) == pytest.approx(0.02361, rel=0.01)


def test_replaying_loses_less_than_starting_again() -> None:
    found = recovery(devices=4)
    assert closed_form(found, 600.0) > restart_all(found, 600.0, 8.0, sqrt(2 * 600.0))


# --------------------------------------------------------------------------- the command


def test_simulate_with_failures_prints_shares(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    words = ["simulate", str(tmp_path / "plan.json"), "--mtbf", "4h"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0
    assert "% of the time; starting everything again" in done.output
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).output)
    assert 0.99 < found["effective"] < 1
    assert 0.99 < found["restart_all"] < 1
    assert found["recovery"]["devices"][0]["log_bytes_per_step"] > 0


def test_a_duration_needs_its_unit(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    done = CliRunner().invoke(cli, ["simulate", str(tmp_path / "plan.json"), "--mtbf", "4x"])
    assert isinstance(done.exception, InputError)
    assert "units: s, min, h, d" in str(done.exception)


def test_a_run_takes_the_planned_intervals(plan: Plan, tmp_path: Path) -> None:
    found = choose(plan, Assumptions(mtbf_s=3600.0))
    asked: dict[str, Any] = {"snapshot_every": None, "commit_every": None, "commits": tmp_path}
    every = found.devices[0].snapshot_every
    wanted = {"snapshot_every": every, "commit_every": found.commit_every}
    assert intervals(plan, "1h", asked) == wanted
    assert intervals(plan, "1h", asked | {"snapshot_every": 7}) == {
        "commit_every": found.commit_every
    }
    assert intervals(plan, "1h", asked | {"commits": None})["commit_every"] is None


# ------------------------------------------------------------ devices that come and go


COLD_S, REFORM_S = 15.0, 1.0  # as `Assumptions` has them


def where(count: int = 3, memory_bytes: int = 2**30) -> Cluster:
    """Devices on hosts of their own, at 1, 2, 3 ... dollars an hour."""
    devices = [device(f"d{i}", 1, memory_bytes, f"h{i}") for i in range(count)]
    prices = tuple((each.name, 1.0 + i) for i, each in enumerate(devices))
    return replace(cluster_of(*devices), prices=prices)


def made(cluster: Cluster, **how: object) -> Plan:
    ops = tuple(replace(op, flops=f"{10**8}*B") for op in wide().ops)
    options = Options(**{"partitioner": "chain-dp", "micro_batches": 4, **how})  # type: ignore[arg-type]
    return make_plan(replace(wide(8), ops=ops), cluster, Source("m.py"), options)


def followed(plan: Plan, *periods: tuple[float, float, str]) -> OverTime:
    each = [Period(start, end, tuple(names.split())) for start, end, names in periods]
    return over_time(plan, each)


def test_devices_that_stay_give_price_times_time() -> None:
    plan = made(where())
    found = followed(plan, (0, 2, "d0 d1 d2"))
    used = sum(where().price[name] for name in plan.stages.devices)
    assert found.usd == pytest.approx(2 * used)
    assert found.computed == pytest.approx(7200 / plan.forecast.step_s * 8)
    assert found.lost_s == 0
    assert found.planning_s < 0.1


def test_a_lost_device_undoes_work_since_the_checkpoint_and_is_planned_without() -> None:
    plan = made(where())
    found = followed(plan, (0, 1, "d0 d1 d2"), (1, 3, "d0 d1"))
    first, second = found.stretches
    assert (first.how, second.how) == ("start", "resplit")
    assert set(second.devices) <= {"d0", "d1"}
    assert second.undone_s == pytest.approx(3600 % found.checkpoint_s)
    assert second.stopped_s > COLD_S
    assert second.step_s is not None
    done = (7200 - second.stopped_s) / second.step_s - second.undone_s / plan.forecast.step_s
    assert second.steps == pytest.approx(done)
    assert 0 < second.planning_s < 5


def test_replicas_go_on_without_one_and_begin_a_step_again() -> None:
    plan = made(where(2), replicas=2, sum_order="micro")
    found = followed(plan, (0, 1, "d0 d1"), (1, 2, "d0"), (2, 3, "d0 d1"))
    ways = [each.how for each in found.stretches]
    assert ways == ["start", "elastic", "resplit"]
    alone = found.stretches[1]
    assert alone.step_s == pytest.approx(2 * plan.forecast.step_s)
    assert alone.stopped_s == REFORM_S
    assert alone.steps == pytest.approx((3600 - REFORM_S) / (2 * plan.forecast.step_s) - 1)
    assert alone.usd == pytest.approx(1.0)
    charged = replace(plan.cluster.default_link, usd_per_gb=100.0)
    dear = replace(plan, cluster=replace(plan.cluster, default_link=charged))
    both, one = followed(dear, (0, 1, "d0 d1"), (1, 2, "d0")).stretches
    assert (both.usd or 0) > 3.1
    assert one.usd == pytest.approx(1.0)  # nobody is left to be sent sums
    in_order_of_replicas = made(where(2), replicas=2, sum_order="replica")
    again = followed(in_order_of_replicas, (0, 1, "d0 d1"), (1, 2, "d0"))
    assert again.stretches[1].how == "resplit"


def test_nothing_is_computed_or_paid_while_nothing_fits() -> None:
    with_room = where(2, 64 * 2**20)
    plan = made(with_room, micro_batches=8)
    assert len(plan.stages.devices) == 2
    small = replace(plan, cluster=replace(with_room, devices=_smaller(with_room)))
    found = followed(small, (0, 1, "d0 d1"), (1, 2, "d1"), (2, 3, "d0 d1"))
    assert [each.how for each in found.stretches] == ["start", "wait", "resplit"]
    assert found.stretches[1].devices == ()
    assert found.stretches[1].usd == 0.0


def _smaller(cluster: Cluster) -> tuple[Device, ...]:
    return tuple(replace(each, memory_bytes=42 * 2**20) for each in cluster.devices)


def test_devices_that_come_are_used_where_they_pay() -> None:
    plan = made(where())
    found = followed(plan, (0, 1, "d0"), (1, 2, "d0 d1 d2"), (2, 3, "d0 d1 d2"))
    assert [each.how for each in found.stretches] == ["start", "resplit", "same"]
    assert found.stretches[1].undone_s == 0.0


def test_inference_loses_nothing() -> None:
    plan = made(where())
    with refused("BX1348"):
        followed(replace(plan, graph=replace(plan.graph, training=False)), (0, 1, "d0"))
