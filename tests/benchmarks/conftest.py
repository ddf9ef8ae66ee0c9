"""Whether anything is measured, and what of the machine is saved beside the figures."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

SAVED = ("brand_raw", "count")


@pytest.fixture(scope="session")
def measuring(request: pytest.FixtureRequest) -> bool:
    """Whether times count: not in the suite (`--benchmark-disable`, or several workers)."""
    option = request.config.getoption
    asked = option("benchmark_enable") or not option("benchmark_disable")
    return bool(asked) and not hasattr(request.config, "workerinput")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Keep what makes figures comparable: without the clock rate of the moment."""
    processor = {name: machine_info["cpu"].get(name) for name in SAVED}
    kept = {name: machine_info[name] for name in ("node", "python_version", "system")}
    machine_info.clear()
    machine_info.update(kept, cpu=processor, torch=version("torch"))


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_compare_machine_info(
    machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse figures of another machine: they say nothing of this one."""
    saved = compared_benchmark["machine_info"]
    other = sorted(name for name in machine_info if saved.get(name) != machine_info[name])
    if other:
        raise pytest.UsageError(
            f"the saved figures are of another machine ({', '.join(other)}): save them here first, "
            "with --benchmark-save"
        )
