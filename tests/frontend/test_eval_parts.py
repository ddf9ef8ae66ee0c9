"""Parts that were made in eval mode and that training puts back are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.frontend import eval_note, eval_parts_kept, eval_parts_note
from tests.support.bundles import cluster


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def net(norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm(4), nn.ReLU()), nn.Dropout(0.1))


def with_eval(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    found = net()
    change(found)
    return found


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (with_eval(lambda n: n[1].eval()), "1"),  # the outermost
        (with_eval(lambda n: (n.get_submodule("1.0").eval(), n[2].eval())), "1.0, 2"),
    ],
)
def test_a_part_that_training_changes_is_named(model: nn.Sequential, names: str) -> None:
    modes = [part.training for part in model.modules()]
    note = eval_parts_note(model)
    assert note is not None
    assert note.partition(":")[0] == names
    assert modes == [part.training for part in model.modules()]


@pytest.mark.parametrize(
    "model",
    [
        net(),
        net(Frozen).train(),  # its class says so: it stays
        net().eval(),  # as from_pretrained returns it
        with_eval(lambda n: n[0].eval()),  # computes the same in both
    ],
)
def test_modules_left_in_training_mode_are_not_named(model: nn.Sequential) -> None:
    assert eval_parts_note(model) is None


MODEL = """import torch
from torch import nn

def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[1].eval()
    return net

def loss(output, batch):
    return output.square().mean()

def example_batch():
    return (torch.ones(4, 4),)
"""


def test_split_says_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    made = bb.split(tmp_path / "net.py", cluster(2), tmp_path / "b", bb.Options("naive"))
    assert any(note.startswith("1: made in eval mode") for note in made.warnings)


def test_a_callers_module_trains_in_the_modes_that_it_has() -> None:
    """A plain loop with it would call no train(): its frozen statistics stay."""
    model = net()
    part = model[1].eval()
    with eval_parts_kept(model):
        model.train()
        assert not part.training
        assert model[0].training
    assert not part.training
    model.train()
    assert part.training


def test_a_callers_module_in_eval_mode_is_named() -> None:
    assert eval_note(net().eval())
    assert not eval_note(net())
    assert not eval_note(nn.Sequential(nn.Linear(4, 4)).eval())  # computes the same in both
