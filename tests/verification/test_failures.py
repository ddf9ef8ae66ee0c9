"""What a bundle says of its data, as an error: the remedy is the message's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.runtime.stream import BatchError
from bigbrain_fx.verification.failures import error_of

SAID = [
    (
        "step 3: batch entry 'x' is float32[12, 4], but the model was split for float32[8, 4]: let "
        "batches() give 8 rows at most, or split again",
        "step 3: batch entry 'x' is float32[12, 4], but the model was split for float32[8, 4]",
        "let batches() give 8 rows at most, or split again",
    ),
    (
        "the batch of step 2 differs between d0 and d1: every process must get the same",
        "the batch of step 2 differs between d0 and d1",
        "every process must get the same",
    ),
    (
        "batches(seed) ended before step 4; yield one batch per step: begin anew at its end",
        "batches(seed) ended before step 4; yield one batch per step: begin anew at its end",
        "use fewer --steps, or let batches(seed) go on",
    ),
    ("step 1: nothing fits", "step 1: nothing fits", "give every batch the shapes of"),
]


@pytest.mark.parametrize(("said", "what", "remedy"), SAID)
def test_a_failure_and_its_remedy_are_parted(said: str, what: str, remedy: str) -> None:
    found = error_of(BatchError(said, code="BX5025"), Path("out"), Path("model.py"))
    assert found is not None
    assert found.what == f"the data do not fit the bundle: {what}"
    assert found.help is not None
    assert found.help.startswith(remedy)
