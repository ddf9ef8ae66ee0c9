"""`run --trace`: instructions as the program has them beside the forecast, whatever the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.bundles.launch import RunError, RunOptions, run
from bigbrain_fx.core import Slice
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import MeasuredRun, read_plan, timeline, typical_step
from tests.support.bundles import copied, edit, split_small

DEADLINE_S = 60.0
IN_STEP = "    for step in itertools.count():\n"
DIES = f"""{IN_STEP}        import contextlib, os, signal
        if step == 2 and {{who}}:
            with contextlib.suppress(FileExistsError):
                os.mkdir("died")  # one of them can, even where both come at once
                {{how}}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("tracing"))


def traced(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def names(events: list[dict[str, Any]], pid: int, row: int, during: dict[str, Any]) -> list[str]:
    until = during["ts"] + during["dur"]
    own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, row)]
    return [e["name"] for e in own if during["ts"] <= e["ts"] <= until and e != during]


def test_a_run_is_drawn_beside_its_forecast(bundle: Path, tmp_path: Path) -> None:
    plan = read_plan(bundle)
    done = run(bundle, RunOptions(3, deadline_s=DEADLINE_S, trace=tmp_path / "new" / "t.json"))
    assert len(done.steps) == 3
    events = traced(tmp_path / "new" / "t.json")
    bars = timeline(plan).timeline
    for pid, device in enumerate(plan.stages.devices, start=1):
        steps = [e for e in events if e["pid"] == pid and e["name"].startswith("step ")]
        assert [e["name"] for e in steps] == ["step 0", "step 1", "step 2"]
        expected = [bar.what for bar in bars if bar.device == device]
        for step in steps:
            own = names(events, pid, 1, step)
            assert [n for n in own if n.split()[0] not in ("send", "recv")] == expected
            assert any(n.startswith("recv ") for n in own)
        held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == pid]
        weights = next(d for d in plan.forecast.devices if d.device == device).weights_bytes
        assert min(held) >= weights
    forecasts = [e for e in events if e["ph"] == "X" and e["tid"] == 2 and e["pid"] == 1]
    assert len(forecasts) == 3 * sum(bar.device == "d0" for bar in bars)
    assert "The same step, measured" in (bundle / "report.html").read_text()


def dying(bundle: Path, folder: Path, who: str, how: str) -> Path:
    copy = copied(bundle, folder)
    edit(copy / "training.py", IN_STEP, DIES.format(who=who, how=how))
    return copy


@pytest.mark.nightly
def test_a_run_that_failed_has_the_trace_that_was(bundle: Path, tmp_path: Path) -> None:
    broken = dying(bundle, tmp_path, 'os.environ.get("RANK") == "0"', "raise OSError('gone')")
    with pytest.raises(RunError):
        run(broken, RunOptions(5, deadline_s=DEADLINE_S, trace=tmp_path / "t.json"))
    events = traced(tmp_path / "t.json")
    assert {"step 0", "step 1", "step 2"} <= {e["name"] for e in events if e["pid"] == 1}
    assert "step 3" not in {e["name"] for e in events}


def test_a_process_that_was_replaced_leaves_what_it_was_in(bundle: Path, tmp_path: Path) -> None:
    broken = dying(bundle, tmp_path, "True", "os.kill(os.getpid(), signal.SIGKILL)")
    options = RunOptions(4, deadline_s=DEADLINE_S, spares=0, trace=tmp_path / "t.json")
    assert run(broken, options).restarts == 1
    events = traced(tmp_path / "t.json")
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert any("was killed by signal 9 in step 2" in each for each in marks)
    again = [e["pid"] for e in events if e["name"] == "step 2" and e["ph"] == "X"]
    assert sorted(again) in ([1, 1, 2], [1, 2, 2])  # cut off, and once more by who replaced it


def test_a_place_that_takes_no_file_is_refused_first(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        run(bundle, RunOptions(1, trace=tmp_path / "file" / "t.json"))


def test_a_typical_step_is_whole_and_no_first_one() -> None:
    lengths = {0: 9.0, 1: 3.0, 2: 2.0, 3: 4.0}
    bars = [Slice("d0", f"step {n}", 10.0 * n, 10.0 * n + s) for n, s in lengths.items()]
    bars += [Slice("d1", f"step {n}", 10.0 * n + 1, 10.0 * n + s) for n, s in lengths.items()]
    bars += [Slice("d1", "step 2", 30.0, 31.0)]  # run twice: not one that counts
    bars += [Slice("d0", "forward 0 #0", 10.5, 12.0), Slice("d0", "recv x", 12.0, 12.5)]
    held = {"d0": ((10.5, 7), (12.0, 9), (99.0, 50))}
    found = typical_step(MeasuredRun(tuple(bars), held), ("d0", "d1"))
    assert found is not None
    assert (found.step, found.step_s, found.busy_s("d0")) == (1, 3.0, 1.5)
    assert [(bar.what, bar.start_s) for bar in found.bars] == [("forward 0 #0", 0.5), ("recv x", 2)]
    assert found.peak_bytes == {"d0": 9}
    assert typical_step(MeasuredRun(tuple(bars[:1]), held), ("d0",)) is None
