"""What `verify` reads again: the model, its data, and a bundle in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import ModelFile, capture, load_model_file
from bigbrain_fx.plan import Plan, Source, with_frozen
from bigbrain_fx.runtime.stream import BatchError
from bigbrain_fx.verification import alone as room
from bigbrain_fx.verification.child import capture_again
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.trace import Trace
from tests.support import samples
from tests.support.command_line import MODEL

FROZEN = """
def model():
    made = Net()
    made.layers[0].requires_grad_(False)
    return made
"""


def loaded(folder: Path, text: str) -> ModelFile:
    folder.mkdir(exist_ok=True)
    (folder / "linears.py").write_text(text)
    return load_model_file(str(folder / "linears.py"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return loaded(tmp_path_factory.mktemp("own"), MODEL)


@pytest.fixture(scope="module")
def plan(file: ModelFile) -> Any:
    graph = capture(file.model, file.example_batch, file.loss).graph
    frozen = with_frozen(replace(graph, training=True), ["layers.0"])
    return SimpleNamespace(graph=frozen, source=Source("model.py"))


def test_parameters_frozen_since_are_named_with_a_remedy(
    file: ModelFile, plan: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"linears\.py trains layers\.0\..*frozen") as caught:
        capture_again(file, plan)
    assert "--model" in str(caught.value.help)
    frozen = loaded(tmp_path / "copy", MODEL + FROZEN)
    assert capture_again(frozen, plan).graph.graded == plan.graph.graded


def test_an_edit_beside_it_is_another_graph(plan: Any, tmp_path: Path) -> None:
    edited = loaded(tmp_path / "edited", MODEL.replace("torch.tanh", "torch.relu"))
    with pytest.raises(InputError, match="gives another graph"):
        capture_again(edited, plan)


# --------------------------------------------------------------------------- data


FILE = """
import torch
from torch import nn
from torch import nn

ROWS = iter(torch.randn(64, 4, 6, generator=torch.Generator().manual_seed(0)))


def model():
    return nn.Linear(6, 1)


def example_batch():
    return {"input": torch.ones(4, 6)}


def loss(output, batch):
    return output.square().mean()


def batches(seed):
    return ({"input": x} for x in ROWS)
"""


@pytest.mark.parametrize("mode", [pytest.param("train", marks=pytest.mark.nightly), "eval"])
def test_an_iterator_outside_batches_is_refused(
    mode: Literal["train", "eval"], tmp_path: Path
) -> None:
    """One device alone: nobody else says the digest of its batch."""
    path = tmp_path / "rows.py"
    path.write_text(FILE)
    made = bb.split(path, samples.cluster(1), tmp_path / "out", bb.Options("naive", mode=mode))
    with pytest.raises(InputError, match=r"batch 0 .entry input. is another one") as error:
        verify(made.bundle, steps=1)
    assert "make in batches() what it changes" in str(error.value.help)


# ------------------------------------------------------------ what a bundle says of its data


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


def test_an_exception_of_torch_is_none_of_this_product() -> None:
    """Both may be installed in one folder: the bundle fails, and another plan may not."""
    try:
        nn.functional.cross_entropy(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long))
    except ValueError as error:
        found = error_of(error, Path("out"), Path("model.py"))
    assert found is not None
    assert found.code == "BX3810"


# --------------------------------------------------------------------------- a process of its own


BUNDLE = ModuleType("train")
STEPS = 2


class Seeded:
    """What of a plan is asked for."""

    seed = 0
    stages = Stages((), ())


PLAN = cast("Plan", Seeded())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a made-up bundle goes by: a number, and whether it fails with that."""
    what: dict[str, Any] = {"number": 1.0, "fails with": ()}

    def run(_bundle: object, _plan: Plan, steps: int, _seed: int) -> Trace:
        if what["number"] in what["fails with"]:
            raise ValueError(f"no {what['number']}")
        losses = [torch.tensor(what["number"], dtype=torch.float64)] * steps
        return Trace(losses, {"w": torch.ones(2)}, {"w": torch.full((2,), 3.0)}, {"w"})

    monkeypatch.setattr(room, "run_bundle", run)
    monkeypatch.setattr(room, "import_bundle", lambda _folder: BUNDLE)
    monkeypatch.setattr(room, "read_plan", lambda _folder: PLAN)
    return what


def test_settings_made_afterwards_are_not_set_there(held: dict[str, Any], tmp_path: Path) -> None:
    with room.Alone() as made:
        held["number"] = 2.0
        found = made.train(tmp_path, PLAN, STEPS)
    assert [float(loss) for loss in found.losses] == [1.0, 1.0]
    assert torch.equal(found.tensors["w"], torch.full((2,), 3.0))
    assert torch.equal(found.gradients["w"], torch.ones(2))
    assert found.unlike == {"w"}


def test_a_failure_of_the_other_process_alone_is_reported(
    held: dict[str, Any], tmp_path: Path
) -> None:
    held["fails with"] = (1.0,)
    with room.Alone() as made:
        held["number"] = 2.0
        with pytest.raises(InputError, match=r"fails in a process of its own: ValueError: no 1\.0"):
            made.train(tmp_path, PLAN, STEPS)


def test_a_failure_of_both_processes_is_raised_as_it_is(
    held: dict[str, Any], tmp_path: Path
) -> None:
    held["fails with"] = (1.0,)
    with room.Alone() as made, pytest.raises(ValueError, match=r"no 1\.0"):
        made.train(tmp_path, PLAN, STEPS)


def test_nobody_who_asks_is_no_error(held: dict[str, Any], tmp_path: Path) -> None:
    with room.Alone():
        held["number"] = 5.0
