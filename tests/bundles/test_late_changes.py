"""A change that counts nothing where it is made counts with the batch, or weights, where it does.

`Constants.required` refuses it then, and the session splits the model again.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.constants import Constants
from bigbrain_fx.frontend import ModelFile
from bigbrain_fx.frontend.plain_entries import changing_numbers
from bigbrain_fx.frontend.tracing.state.changed_module import TRIED
from tests.support.messages import refused

Batch = dict[str, Tensor]


def batch_of(*labels: int) -> Batch:
    return {"input": torch.linspace(-1, 1, 32).view(8, 4), "y": torch.tensor(labels * 4)}


def constants_of(loss: Callable[[Tensor, Batch], Tensor], model: nn.Module) -> Constants:
    return Constants(model, batch_of(0, 1), loss, None)


def test_a_pull_to_the_weights_of_now_counts() -> None:
    """As elastic weight consolidation has it: nothing, before the next step."""
    model, anchors = nn.Linear(4, 4), dict[str, Tensor]()

    def loss(output: Tensor, batch: Batch) -> Tensor:
        pulls = [(p - anchors[n]).square().sum() for n, p in model.named_parameters() if anchors]
        return nn.functional.cross_entropy(output, batch["y"]) + sum(pulls)

    constants = constants_of(loss, model)
    constants.required(batch_of(0, 1))
    anchors |= {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = [p.clone() for p in model.parameters()]
    with refused("BX2152b", bb.InputError):
        constants.required(batch_of(0, 1))
    assert all(map(torch.equal, weights, model.parameters()))


def test_the_weight_of_a_class_counts_with_the_first_batch_that_has_it() -> None:
    shares = [1.0, 1.0, 1.0, 1.0]

    def loss(output: Tensor, batch: Batch) -> Tensor:
        each = nn.functional.cross_entropy(output, batch["y"], reduction="none")
        return (each * torch.tensor(shares)[batch["y"]]).mean()

    constants = constants_of(loss, nn.Linear(4, 4))
    shares[3] = 5.0
    for _ in range(3):
        constants.required(batch_of(0, 1))
    with refused("BX2152b", bb.InputError):
        constants.required(batch_of(0, 3))


@pytest.mark.parametrize("kind", [SimpleNamespace, Namespace])
def test_an_option_of_a_script_counts_where_forward_reads_it(kind: Callable[..., Any]) -> None:
    options = kind(model=kind(scale=1.0))

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.options: Any = options

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * float(self.options.model.scale)

    model = Net()
    constants = constants_of(lambda output, _batch: output.square().mean(), model)
    constants.required(batch_of(0, 1))
    options.model.scale = 0.5
    with refused("BX2152", bb.InputError):
        constants.required(batch_of(0, 1))
    assert options.model.scale == 0.5


def test_a_threshold_counts_by_the_weights_of_now() -> None:
    """The module has those of the beginning; `refresh` gives it the others."""
    model, rate = nn.Linear(4, 4), {"tau": 100.0}

    def loss(output: Tensor, _batch: Batch) -> Tensor:
        return output.mean() + ((output > rate["tau"]) * output).mean()

    def refresh() -> None:
        with torch.no_grad():
            model.weight.mul_(100.0)

    constants = constants_of(loss, model)
    rate["tau"] = 5.0
    with refused("BX2152b", bb.InputError):
        constants.required(batch_of(0, 1), refresh)


def test_each_change_is_tried_after_many_that_counted_nothing() -> None:
    limit = {"most": 1000.0, "step": 0}

    def loss(output: Tensor, _batch: Batch) -> Tensor:
        assert limit["step"] >= 0
        return output.clamp(max=limit["most"]).mean()

    constants, tried = constants_of(loss, nn.Linear(4, 4)), list[int]()
    limit["most"] = 999.0
    for step in range(2 * TRIED):
        constants.required(batch_of(0, 1), lambda step=step: tried.append(step))  # type: ignore[misc]
    assert tried == [*range(TRIED + 1), 2 * TRIED - 1][: len(tried)]
    limit["most"] = -5.0
    with refused("BX2152b", bb.InputError):
        constants.required(batch_of(0, 1))


@pytest.mark.parametrize("rows", [4, 8])
def test_a_batch_unlike_the_example_leaves_the_trial_to_that(rows: int) -> None:
    scale = [1.0]

    def loss(output: Tensor, _batch: Batch) -> Tensor:
        return output.mean() * scale[0]

    constants = constants_of(loss, nn.Linear(4, 4))
    scale[0] = 2.0
    with refused("BX2152b", bb.InputError):
        constants.required({name: tensor[:rows] for name, tensor in batch_of(0, 1).items()})


def test_another_function_for_the_rest_of_the_training_counts() -> None:
    def focal(output: Tensor, labels: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(output, labels, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    kind: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return kind(output, batch["y"])

    constants = constants_of(loss, nn.Linear(4, 4))
    constants.required(batch_of(0, 1))
    kind = focal
    with refused("BX2152b", bb.InputError):
        constants.required(batch_of(0, 1))


def test_a_threshold_in_the_batch_counts_before_anything_passes_it() -> None:
    def loss(output: Tensor, batch: dict[str, object]) -> Tensor:
        assert isinstance(batch["epoch"], int)
        return output.mean() + ((output > batch["tau"]) * output).mean()  # type: ignore[operator]

    first = {"input": torch.ones(8, 4), "tau": 100.0, "epoch": 0}
    constants = Constants(nn.Linear(4, 4), first, loss, None)
    constants.required(first | {"epoch": 1})
    with refused("BX2164", bb.InputError):
        constants.required(first | {"tau": 90.0})


def test_a_changing_threshold_of_the_first_batches_is_an_input(tmp_path: Path) -> None:
    """Nothing passes it at the first weights, and a trace that kept it would never see another."""
    rates = (100.0, 90.0, 80.0)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.mean() + ((output > batch["tau"]) * output).mean()

    drawn = [{"input": torch.ones(8, 4), "tau": tau, "step": n} for n, tau in enumerate(rates)]
    file = ModelFile(
        tmp_path / "model.py",
        "model",
        nn.Linear(4, 4),
        drawn[0],
        loss=loss,
        batches=lambda _seed: iter(drawn),
    )
    assert changing_numbers(file, 0) == {("tau",): "float32"}


def test_a_parameter_that_is_replaced_counts() -> None:
    """As torch.nn.utils.prune does it: it has another name, and a mask beside it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    constants = constants_of(lambda output, _: output.square().mean(), model)
    constants.required(batch_of(0, 1))
    prune.l1_unstructured(model[1], "weight", 0.5)
    with refused("BX2152", bb.InputError):
        constants.required(batch_of(0, 1))
