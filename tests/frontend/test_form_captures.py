"""Forms of training code and what a capture makes of each: the table of form_captures.json."""

from __future__ import annotations

import json

import pytest

from tests.frontend.form_captures import TABLE, outcome
from tools.conformance.forms import find, forms

CAPTURES: dict[str, str] = json.loads(TABLE.read_text())
GATE = (
    *("saved-hooks-global", "tensor-hook", "vmapped-ensemble", "array-entry", "entry-second"),
    *("one-memory-written", "keys-odd", "observer-assigned", "observer-read", "target-copied"),
)


def test_every_form_is_in_the_table() -> None:
    assert list(CAPTURES) == [form.name for form in forms()]


@pytest.mark.gate(*GATE)
@pytest.mark.filterwarnings("default")  # a user's file may warn
@pytest.mark.parametrize("name", CAPTURES)
def test_a_form_is_captured_as_in_the_table(name: str) -> None:
    assert outcome(find(name)) in CAPTURES[name].split(" or ")  # threads race
