"""Options as Python gives them: lists and strings that fit are taken, others refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.bundles import RunOptions, estimate, run
from bigbrain_fx.bundles.typed import of_its_types
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options

ROOT = Path(__file__).parents[2]


def _options(**given: Any) -> Options:  # what mypy would not let through
    return Options(**given)


def test_values_of_the_type_are_taken() -> None:
    given = _options(replicas="auto", recompute=[0, 2], replica_shares=[3, 1])
    found = of_its_types(given, but=("partitioner",))
    assert (found.replicas, found.recompute, found.replica_shares) == (0, (0, 2), (3, 1))
    where: Any = "saved"
    assert of_its_types(RunOptions(save=where)).save == Path("saved")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"offload": "state"}, "valid tuple"),  # it would have been five letters
        ({"leaves": "blocks"}, "valid tuple"),
        ({"recompute": "al"}, "'all', 'ops' or 'auto'"),
        ({"sum_order": "bogus"}, "'replica', 'micro', 'tree' or 'backend'"),
        ({"micro_batches": "x"}, "valid integer"),
        ({"replicas": -2}, "greater than or equal to 0"),
    ],
)
def test_values_of_another_type_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=f"Options\\({next(iter(given))}=.*{expected}") as error:
        of_its_types(_options(**given), but=("partitioner",))
    assert "is of type" in (error.value.help or "")


def test_both_doors_ask(tmp_path: Path) -> None:
    """`split` and `estimate` share theirs; nothing is captured or started before."""
    with pytest.raises(InputError, match=r"Options\(tensor=2\.5\)"):
        estimate(ROOT / "models/gpt.py", tmp_path / "absent.json", _options(tensor=2.5))
    steps: Any = "ten"
    with pytest.raises(InputError, match=r"RunOptions\(steps='ten'\)"):
        run(tmp_path, RunOptions(steps=steps))
