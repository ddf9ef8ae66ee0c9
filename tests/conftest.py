"""Options and fixtures for all tests."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import examples, quick, recording, selection
from tests.support.message_plugin import MessagesPlugin
from tests.support.messages import UPDATE, recorder
from tests.support.slices import Slice, SliceError, parsed
from tests.support.warm import Nursery, cold_starts, warm_starts

examples.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden/ anew instead of comparing with it; then review `git diff`",
    )
    parser.addoption(
        UPDATE,
        action="store_true",
        help="write tests/*/messages.json anew for the tests that run; then review `git diff`",
    )
    parser.addoption(
        "--cold",
        action="store_true",
        help="start all the product's processes as new Pythons: ten minutes more",
    )
    parser.addoption("--slice", help="run a part of the tests, for example 3/8")
    parser.addoption(
        "--turn", type=int, default=0, help="begin the slice with other files on each turn"
    )
    parser.addoption("--until", type=float, help="start no test after this Unix time")
    parser.addoption("--record", type=Path, help="write outcomes and durations to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(recording.Recorder(file), "recorder")
    _part(config)  # a slice that does not exist is refused before anything is collected
    recorder.updates = bool(config.getoption(UPDATE))
    config.pluginmanager.register(MessagesPlugin(config))
    os.environ.setdefault("BIGBRAIN_NO_REHEARSAL", "1")  # `rehearsals` has them
    os.environ.setdefault("BIGBRAIN_NO_CACHE", "1")  # its own tests have one each


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `split` train a few steps beside the user's loop, as it does for users."""
    monkeypatch.delenv("BIGBRAIN_NO_REHEARSAL", raising=False)


@pytest.hookimpl(tryfirst=True)  # before `-m "not nightly"` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.mark_cases(items)
    whole_files = not any("::" in str(arg) for arg in config.args)
    if whole_files and (unknown := selection.unknown_cases(items)):
        raise pytest.UsageError(f"`gate` names cases that do not exist: {', '.join(unknown)}")
    part = _part(config)
    if part is None:
        selection.longest_first(items)
        return
    items[:], others = selection.of_slice(items, part)
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    quick.collect_rarely()
    quick.queue_no_seeds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(recording.LATE)


def _part(config: pytest.Config) -> Slice | None:
    text = config.getoption("--slice")
    if text is None:
        return None
    try:
        part = parsed(text)
    except SliceError as error:
        raise pytest.UsageError(str(error)) from None
    return Slice(part.number, part.count, config.getoption("--turn"))


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """The product's Python processes start as forks of one that has imported torch."""
    made, cold = Nursery(), request.config.getoption("--cold") or sys.platform != "linux"
    with cold_starts() if cold else warm_starts(made):
        yield made
    made.close()


@pytest.fixture(scope="session", autouse=True)
def bundles_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where this run's processes keep the bundles that many tests need."""
    from tests.support import cached_bundles

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cached_bundles.FOLDER, str(shared / "bundles"))
        yield


@pytest.fixture
def cold() -> Iterator[None]:
    """The product's processes start as new Pythons, as they do for a user."""
    with cold_starts():
        yield


@pytest.fixture(scope="module")
def learned_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small fitted model; the environment names it, so that `learned` can be made."""
    from tests.support.fitted import costs_file

    path = costs_file(tmp_path_factory.mktemp("learned") / "costs.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_LEARNED_COSTS", str(path))
        yield path


@pytest.fixture(scope="module")
def layer_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Seconds of all that no module computes; the environment names the file."""
    path = tmp_path_factory.mktemp("layers") / "times.json"
    time = {"card": "slow", "rows": 2, "forward": 1e-3, "backward": 2e-3}
    layer = {"modules": ["loss"], "times": [time]}
    path.write_text(json.dumps({"format": "layer-times-1", "layers": [layer]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_LAYER_TIMES", str(path))
        yield path


@pytest.fixture(scope="module")
def profile_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles of the ops of some synthetic graphs; the environment names the file."""
    from tests.support.profiled import database

    path = database(tmp_path_factory.mktemp("measured") / "profiles.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_PROFILES", str(path))
        yield path
