"""Whether a moved run adds the same numbers in the same order as before, in words."""

from __future__ import annotations

from typing import Any

import pytest

from bigbrain_fx.bundles.resplitting.order import order_notes
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support.bundles import MODEL, cluster


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    wanted: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "stages": (2, {}),
        "replicas": (2, {"replicas": 2}),
        "micro": (2, {"replicas": 2, "sum_order": "micro"}),
        "gems": (2, {"schedule": "gems"}),
        "group": (2, {"tensor": 2}),
    }
    path = tmp_path_factory.mktemp("order") / "letters.py"
    path.write_text(MODEL)
    file, found = load_model_file(path), {}
    graph = capture(file.model, file.example_batch, file.loss).graph
    for name, (devices, choices) in wanted.items():
        options = Options("naive", **{"schedule": "1f1b", "micro_batches": 4, **choices})
        found[name] = make_plan(graph, cluster(devices), Source(str(path), True), options)
    return found


@pytest.mark.gate(
    "gems-gems-said2",
    "gems-one-said5",
    "group-group-said3",
    "group-one-said8",
    "micro-one-said1",
    "one-replicas-said4",
    "one-stages-said6",
    "stages-stages-said7",
)
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("one", "micro", ()),
        ("micro", "one", ()),
        ("gems", "gems", ()),
        ("group", "group", ()),
        ("one", "replicas", ("are now added replica by replica (2 + 2 micro-batches)",)),
        ("gems", "one", ("are now added one micro-batch after the other", "other stages share")),
        ("one", "stages", ("other stages share embed.weight",)),
        ("stages", "stages", ()),
        ("group", "one", ("what tensor groups divide",)),
    ],
)
def test_a_move_changes_placement_alone(
    plans: dict[str, Plan], before: str, after: str, said: tuple[str, ...]
) -> None:
    found = order_notes(plans[before], plans[after])
    assert len(found) == len(said)
    assert all(words in note for words, note in zip(said, found, strict=True))
