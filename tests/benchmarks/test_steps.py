"""Step time of emitted bundles, split equally by count (naive) and by forecast (analytical).

Real processes over gloo: on this host, whose devices are alike; and on an emulated cluster of two
devices, one twice as fast as the other, behind 1 Gbit/s (Linux and root). One benchmark round is
one training step. The forecast of the same plan stands in `extra_info`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bigbrain_fx.bundles.launch import Line, Run, RunOptions, StepLine, run
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.measure.comparison import Comparison, compare
from bigbrain_fx.plan import Options
from tools.studies.emulation import emulated, missing

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ("naive", "analytical")
WARM_UP = 2  # the first steps also allocate
ROUNDS = 10
FOUR = Options(micro_batches=4)
WIRE = Link(1e-3, 125e6)


def cluster(*speeds: float) -> Cluster:
    devices = (
        Device(f"d{i}", f"h{i}", "cpu", 2**30, speed * 1e10, speed * 5e9, 1e-6)
        for i, speed in enumerate(speeds)
    )
    return Cluster(tuple(devices), WIRE)


def split(folder: Path, devices: Cluster, measuring: bool) -> Comparison:
    """Split a GPT both ways; a small model where nothing is measured."""
    model = ROOT / "models" / ("gpt.py" if measuring else "digits.py")
    return compare(model, devices, SPLITS, FOUR, save=folder / "bundles")


def step_times(
    benchmark: BenchmarkFixture,
    found: Comparison,
    name: str,
    logs: Path,
    runner: Callable[..., Run],
    measuring: bool,
) -> None:
    contender = found.of(name)
    rounds, before = (ROUNDS, WARM_UP) if measuring else (1, 0)
    with stepping(runner, Path(contender.bundle), logs, rounds + before) as step:
        for _ in range(before):
            step()
        reported_s = []
        benchmark.pedantic(lambda: reported_s.append(step()), rounds=rounds)
    benchmark.extra_info["forecast_step_s"] = contender.step_s
    benchmark.extra_info["reported_step_s"] = reported_s
    assert len(reported_s) == rounds


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory, measuring: bool) -> Comparison:
    return split(tmp_path_factory.mktemp("alike"), cluster(1, 1), measuring)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory, measuring: bool) -> Comparison:
    return split(tmp_path_factory.mktemp("unlike"), cluster(2, 1), measuring)


@pytest.fixture(scope="module")
def network(measuring: bool) -> Iterator[Callable[..., Run]]:
    """Run a bundle on the emulated cluster."""
    if not measuring:
        pytest.skip("an emulated cluster is set up only to be measured: make bench")
    if missing() is not None:
        pytest.skip(f"no emulated cluster: {missing()}")
    with emulated(cluster(2, 1)) as net:
        yield net.run


@pytest.mark.nightly
@pytest.mark.benchmark(group="step, two processes of this host")
@pytest.mark.parametrize("name", SPLITS)
def test_step_on_this_host(
    benchmark: BenchmarkFixture, alike: Comparison, name: str, tmp_path: Path, measuring: bool
) -> None:
    step_times(benchmark, alike, name, tmp_path / "logs", run, measuring)


@pytest.mark.benchmark(group="step, emulated 2:1 at 1 Gbit/s")
@pytest.mark.parametrize("name", SPLITS)
def test_step_on_unlike_devices(
    benchmark: BenchmarkFixture,
    network: Callable[..., Run],
    unlike: Comparison,
    name: str,
    tmp_path: Path,
    measuring: bool,
) -> None:
    step_times(benchmark, unlike, name, tmp_path / "logs", network, measuring)


@pytest.mark.nightly
def test_the_forecast_of_unlike_devices(unlike: Comparison) -> None:
    """Without emulation too: by forecast, looking at speeds is never worse than counting ops."""
    naive, analytical = (unlike.of(name).step_s for name in SPLITS)
    assert naive is not None
    assert analytical is not None
    assert analytical <= naive


DEADLINE_S = 120.0
Step = Callable[[], float]
"""Wait for a bundle's next step; return the seconds that it says it took."""


@contextmanager
def stepping(runner: Callable[..., Run], bundle: Path, logs: Path, steps: int) -> Iterator[Step]:
    """Run a bundle beside this thread; give what waits for its next step.

    A step begins when the one before it ends, so a caller who does nothing else waits as long as a
    step takes. What the run raised is raised here.
    """
    lines: queue.SimpleQueue[Line | BaseException] = queue.SimpleQueue()
    options = RunOptions(steps=steps, logs=logs, deadline_s=DEADLINE_S)

    def go() -> None:
        try:
            runner(bundle, options, lines.put)
        except BaseException as error:  # raised again by who waits
            lines.put(error)

    def following() -> float:
        line = lines.get(timeout=DEADLINE_S)
        if isinstance(line, BaseException):
            raise line
        assert isinstance(line, StepLine)
        return line.step_s

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield following
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
