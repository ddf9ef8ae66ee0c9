"""Options and fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow import is_slow
from tests.support.warm import Nursery, cold_starts, warm_starts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden/ anew instead of comparing with it; then review `git diff`",
    )
    parser.addoption(
        "--cold",
        action="store_true",
        help="start all the product's processes as new Pythons: ten minutes more",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m "not promise"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.promise)


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
def profile_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles of the ops of some synthetic graphs; the environment names the file."""
    from tests.support.profiled import database

    path = database(tmp_path_factory.mktemp("measured") / "profiles.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_PROFILES", str(path))
        yield path
