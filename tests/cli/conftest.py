"""The smallest bundle, once a run of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import tiny_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.getbasetemp())
