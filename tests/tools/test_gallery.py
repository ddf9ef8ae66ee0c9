"""The pictures of docs/reference/schedules.md are what the simulator and the emitter say today."""

from __future__ import annotations

import pytest

from tools.gallery import (
    DOC,
    OVERLAP,
    OVERLAPPING,
    SHELF,
    SHOWN,
    picture,
    with_code,
    with_pictures,
)


@pytest.mark.nightly
def test_the_page_is_as_it_is_drawn() -> None:
    text = DOC.read_text()
    assert all(f"<!-- {schedule} -->" in text for schedule in SHOWN)
    assert with_pictures(text) == text


def test_the_page_of_steps_that_overlap_is_as_it_is_drawn() -> None:
    text = OVERLAP.read_text()
    assert all(f"<!-- {mode} -->" in text for mode in OVERLAPPING)
    assert with_pictures(text) == text


def test_of_steps_that_overlap_no_unit_between_is_idle() -> None:
    for mode in OVERLAPPING:
        text = picture(mode)
        rows = [line.split()[1:] for line in text.splitlines()[1:5]]
        assert "12 units a step in a row, 21 alone" in text
        assert all(sum(cell != "." for cell in row) == 3 * 12 for row in rows)
        last = rows[-1]
        assert "." not in last[last.index("F0") :][:36]  # the last stage goes from batch to batch
    assert picture("stash").count("self.update()") == 2
    assert "self.update()" in picture("2bw").splitlines()[-2]


def test_the_gallery_shows_what_is_emitted() -> None:
    text = SHELF.read_text()
    assert text.count("<!-- tests/golden/") >= 7
    assert with_code(text) == text, "python -m tools.gallery"
