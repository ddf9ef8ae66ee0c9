"""The picture of README is drawn from today's plan; `python -m tools.readme_picture`."""

from __future__ import annotations

import pytest

from tools.readme_picture import PICTURE, drawn


@pytest.mark.nightly
def test_the_picture_is_that_of_the_plan() -> None:
    assert PICTURE.read_text(encoding="utf-8") == drawn(), "run `python -m tools.readme_picture`"
