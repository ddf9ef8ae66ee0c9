"""One small bundle for all tests of this folder: to split it takes longer than to run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import split_small


@pytest.fixture(scope="session")
def trained_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle for two devices; a test that changes it takes a copy."""
    return split_small(tmp_path_factory.mktemp("trained_bundle"))
