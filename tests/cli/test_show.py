"""What is printed of a plan: its limits first, exact text in a pipe, traces, JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles.verifying import Check, Verification
from bigbrain_fx.cli.console import (
    MOST_CUTS,
    plan_json,
    show_explanation,
    show_forecast,
    show_plan,
    show_verification,
)
from bigbrain_fx.cli.output import json_line
from bigbrain_fx.cli.tracing import print_trace
from bigbrain_fx.cli.verdict import verdict
from bigbrain_fx.plan import explain
from bigbrain_fx.plan.explain import Cut, DevicePart, Explanation
from tests.plan.test_explain import hand_made_costs, placed, stack, two

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here

Capture = pytest.CaptureFixture[str]

# busy s: 2 ops x 3 s and 3 ops x 3 s. weights: 1 KiB an op; gradients and Adam's two moments
PLAN = """\
toy: 1,280 parameters, 5 ops, 2 stages; 1f1b, 1 micro-batch of 4 rows
fits 2 devices: 18 s a step, 0.222 rows/s (90 % interval 14.04 to 23.04 s)
limits: b is busy 50 % of a step (all devices 42 %); b is fullest, {b} of 64.0 MiB (0 %)
better: --partitioner auto also tries replicas, tensor parallelism and other schedules
device  stages  modules            ops  busy s   idle s    memory       of
a       0       embed to layers.0    2  6.0000  12.0000  {a} 64.0 MiB
b       1       layers.1 to head     3  9.0000   9.0000  {b} 64.0 MiB
naive: by hand
cut 0 -> 1 after layers.0: 4.0 KiB a micro-batch in 1500.00 ms, gradients back 4.0 KiB in 1500.00 ms
  with layers.0 on b: 18.0000 s (+0.0 %)
  with layers.1 on a: 18.0000 s (+0.0 %)
forecast 18.0000 s a step
"""


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_plan(capsys: Capture) -> None:
    plan = placed(stack(), "aabbb", two())
    a, b = (f"{entry.peak_bytes / 1024:.1f} KiB" for entry in plan.forecast.devices)
    show_plan(plan, 5 * 256, verbose=True)
    assert words(capsys.readouterr().out) == words(PLAN.format(a=a, b=b))
    show_plan(plan, 5 * 256)
    assert words(capsys.readouterr().out) == words(PLAN.format(a=a, b=b))[:7]


def test_a_forecast(capsys: Capture) -> None:
    plan = placed(stack(), "aabbb", two())
    show_forecast(plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: naive with analytical, 1f1b, 1 micro-batch of 4 rows"
    assert [line.partition(" ")[0] for line in lines[1:4]] == ["fits", "limits:", "better:"]
    assert lines[4].split()[-3:] == ["messages", "peak", "of"]
    assert lines[5].split()[:5] == ["a", "6.0000", "12.0000", "2.0", "KiB"]  # two weights
    assert lines[6].split()[:5] == ["b", "9.0000", "9.0000", "3.0", "KiB"]
    assert len(lines) == 7
    assert len({len(line) for line in lines[4:]}) == 1  # columns stand under their heads


def test_a_plan_as_json() -> None:
    plan = placed(stack(), "aabbb", two())
    found = json.loads(json_line(plan_json(plan)))
    assert found["step_s"] == 18.0
    assert found["stages"] == 2
    assert [entry["memory_bytes"] for entry in found["devices"]] == [2**26, 2**26]
    assert [entry["weights_bytes"] for entry in found["devices"]] == [2048, 3072]


def explanation(cuts: int = 0, moved: tuple[str, ...] = (), modules: str = "all") -> Explanation:
    part = DevicePart("d0", (0,), modules, 1, 0.5, 0.5, 1024, 2048)
    found = tuple(Cut(i, i + 1, f"after b{i}", ("v",), i, 0.0, 0, 0.0, ()) for i in range(cuts))
    return Explanation(1.0, "", (part,), found, moved)


def test_only_the_largest_of_many_cuts(capsys: Capture) -> None:
    show_explanation(explanation(cuts=MOST_CUTS + 3))
    out = capsys.readouterr().out
    assert "cut 2 -> 3" not in out  # 0, 1 and 2 bytes
    assert "cut 3 -> 4 after b3: 3 B a micro-batch in 0.00 ms\n" in out
    assert "and 3 smaller cuts, see --json\n" in out


def test_moved_ops(capsys: Capture) -> None:
    show_explanation(explanation(moved=("add", "relu")))
    assert "2 ops moved to stay with others: add, relu\n" in capsys.readouterr().out
    show_explanation(explanation(moved=tuple("abcdefg")))
    assert "7 ops moved to stay with others: a, b, c, d, e, ...\n" in capsys.readouterr().out


def test_names_are_no_markup(capsys: Capture) -> None:
    show_explanation(explanation(modules="[red]x[/] to y[0]"))
    assert "[red]x[/] to y[0]" in capsys.readouterr().out
    plan = placed(stack(), "aaaaa", two())
    show_forecast(replace(plan, graph=replace(plan.graph, name="[bold]N[/x]")))
    assert capsys.readouterr().out.startswith("[bold]N[/x]: ")


def test_a_verification(capsys: Capture) -> None:
    long = "gradient of [a] " * 20
    show_verification(Verification((Check("losses", True, "5 steps"), Check("w", False, long))))
    checks = f"equal  losses: 5 steps\nDIFFERENT  w: {long}\n"
    assert capsys.readouterr().out == f"FAILED: 1 of 2 checks\n{checks}"


def test_speed_comes_first_and_limits_name_their_device() -> None:
    speed, limits, better = verdict(placed(stack(), "aabbb", two()))
    assert speed == "fits 2 devices: 18 s a step, 0.222 rows/s (90 % interval 14.04 to 23.04 s)"
    assert limits.startswith("limits: b is busy 50 % of a step (all devices 42 %); b is fullest, ")
    assert better.startswith("better: --partitioner auto ")


def test_a_plan_that_leaves_devices_idle_says_how_many_and_how_to_use_all() -> None:
    speed, _, better = verdict(placed(stack(), "aaaaa", two()))
    assert speed.startswith("fits 1 of 2 devices: ")
    assert "--partitioner naive" in better


def test_a_faster_neighbour_of_a_cut_is_named_with_its_pin() -> None:
    plan = placed(stack(), "aaaab", two())
    found = explain(plan)
    slower = replace(plan, forecast=replace(plan.forecast, step_s=plan.forecast.step_s * 2))
    *_, better = verdict(slower, replace(found, step_s=found.step_s * 2))
    assert better.startswith("better: --pin ")
    assert "=" in better


def test_the_pin_of_a_block_that_a_cut_divides_is_its_name() -> None:
    graph = stack(("embed", "layers.0", "layers.0", "layers.0", "head"))
    plan = placed(graph, "aaabb", two())
    slow = replace(plan, forecast=replace(plan.forecast, step_s=2 * plan.forecast.step_s))
    *_, better = verdict(slow, explain(plan))
    assert re.match(r"better: --pin layers\.0=[ab];", better)


def test_a_trace_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = replace(two(), prices=(("a", 1.0), ("b", 2.0)))
    plan = replace(placed(stack(), "aabbb", two()), cluster=where)  # 4 rows in 18 s
    path = tmp_path / "trace.json"
    changes = [{"from_h": 0, "devices": ["a", "b"]}, {"from_h": 1, "devices": ["b"]}]
    path.write_text(json.dumps({"format": "availability-1", "until_h": 2, "changes": changes}))
    print_trace(plan, path, as_json=False)
    first, second, total, planning = capsys.readouterr().out.splitlines()
    assert first == "0 to 1 h: start on a, b: 18 s a step, 800 rows, 3 USD"
    assert second.startswith("1 to 2 h: resplit on b: 15 s a step, ")
    assert "15 s stopped" in second
    assert total.startswith("in all: ")
    assert "rows for 5 USD" in total
    assert planning.startswith("planning anew took ")
    print_trace(plan, path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["usd"] == 5.0
    assert [each["how"] for each in found["periods"]] == ["start", "resplit"]
