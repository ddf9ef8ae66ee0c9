"""A good bundle passes, and each way of breaking it fails at the link that broke."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import bigbrain_fx
from bigbrain_fx.bundles.verifying import Verification, verify
from bigbrain_fx.errors import InputError, VerificationError
from bigbrain_fx.runtime.weights import read_index
from bigbrain_fx.weights import rewrite_index
from tests.support.bundles import MODEL, cluster, copied, edit, split_small
from tests.support.command_line import call

LIMIT_S = 120.0
LINKS = (
    "plain PyTorch = captured graph",
    "weights = your model's",
    "captured graph = reference",
    "reference = bundle, losses",
    "reference = bundle, gradients",
    "reference = bundle, weights",
)
MICRO_BATCHES = "whole batch = micro-batches"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("verify"))


def checked(bundle: Path, processes: bool = False) -> Verification:
    return verify(bundle, steps=3, time_limit_s=LIMIT_S, processes=processes)


def failed(found: Verification) -> list[str]:
    return [check.name for check in found.checks if not check.passed]


@pytest.mark.nightly
def test_a_good_bundle_passes(bundle: Path) -> None:
    found = checked(bundle)
    assert tuple(check.name for check in found.checks) == (*LINKS, MICRO_BATCHES)
    assert failed(found) == []
    assert found.passed
    found.require_passed()
    assert "3 steps bitwise" in str(found)


@pytest.mark.nightly
def test_a_bundle_verifies_as_real_processes(bundle: Path) -> None:
    found = checked(bundle, processes=True)
    assert failed(found) == []
    assert len(found.checks) == len(LINKS) + 1


@pytest.mark.nightly
def test_a_changed_weight_is_found(bundle: Path, tmp_path: Path) -> None:
    copy = copied(bundle, tmp_path)
    file = copy / "weights" / "d1.safetensors"
    tensors = load_file(file)
    tensors["blocks.3.up.bias"][5] += 1e-7
    save_file(tensors, file)
    # who writes other weights there on purpose
    rewrite_index(copy / "weights", copy / "weights", read_index(copy / "weights").owner)
    found = checked(copy)
    assert failed(found) == ["weights = your model's"]
    with pytest.raises(VerificationError, match="weights = your model's") as error:
        found.require_passed()
    assert error.value.exit_code == 5
    assert error.value.notes == (
        "weights = your model's: blocks.3.up.bias has other numbers than the model",
    )


def test_an_edited_device_file_is_found(bundle: Path, tmp_path: Path) -> None:
    """Another epsilon in one layer norm: too small a change for a curve of losses to show."""
    copy = copied(bundle, tmp_path)
    edit(
        copy / "device_d1.py",
        "self.norm = nn.LayerNorm(16)",
        "self.norm = nn.LayerNorm(16, eps=2e-5)",
    )
    found = checked(copy, processes=True)
    assert failed(found) == list(LINKS[3:])
    with pytest.raises(VerificationError, match="reference = bundle, losses") as error:
        found.require_passed()
    assert error.value.exit_code == 5
    assert "reference = bundle, losses: step " in error.value.notes[0]


@pytest.mark.nightly
def test_a_dropout_that_is_forgotten_is_found(bundle: Path, tmp_path: Path) -> None:
    copy = copied(bundle, tmp_path)
    edit(copy / "model_blocks.py", "    with self.seeded(", "    with self.seeded('other' + ")
    assert failed(checked(copy)) == list(LINKS[3:])


@pytest.mark.nightly
def test_an_edited_optimizer_is_the_same_for_both(bundle: Path, tmp_path: Path) -> None:
    """How a bundle is trained is the user's to change: the reference trains the same way."""
    copy = copied(bundle, tmp_path)
    edit(copy / "training.py", "return 1.0 /", "return 0.5 /")
    assert failed(checked(copy)) == []


@pytest.mark.nightly
def test_a_model_file_that_has_changed(tmp_path: Path) -> None:
    bundle, file = split_small(tmp_path, fresh=True), tmp_path / "letters.py"
    edit(file, "    return Net()", "    torch.manual_seed(5)\n    return Net()")
    done = call("verify", bundle, "--steps", "1")
    assert done.code == 5
    assert "weights = your model's" in done.err

    edit(file, "F.gelu", "F.relu")
    with pytest.raises(InputError, match=r"letters\.py gives another graph") as error:
        checked(bundle)
    assert "split it again" in str(error.value.help)


@pytest.mark.nightly
def test_a_model_file_that_has_moved(tmp_path: Path) -> None:
    """Comments and another name are no change."""
    bundle, moved = split_small(tmp_path, fresh=True), tmp_path / "moved.py"
    (tmp_path / "letters.py").rename(moved)
    with pytest.raises(InputError, match=r"letters\.py"):
        checked(bundle)
    edit(moved, "import itertools", "# A new line shifts all others.\nimport itertools")
    assert verify(bundle, steps=1, model=str(moved), time_limit_s=LIMIT_S).passed


def test_a_time_limit_holds(bundle: Path) -> None:
    with pytest.raises(InputError, match=r"verification took longer than 0.01 s"):
        verify(bundle, time_limit_s=0.01)


def test_a_module_in_memory_has_no_file_to_ask(bundle: Path, tmp_path: Path) -> None:
    plan = bigbrain_fx.read_plan(bundle)
    text = (bundle / "plan.json").read_text().replace(f'"path":"{plan.source.path}"', '"path":""')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match="split from a module in memory") as error:
        verify(tmp_path)
    assert "--model" in str(error.value.help)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_clipping_a_model_of_another_type(kind: str, tmp_path: Path) -> None:
    """Norms are messages, too: they have the type of their gradients."""
    made_so = f"    return Net().to(torch.{kind})"
    (tmp_path / "letters.py").write_text(MODEL.replace("    return Net()", made_so))
    options = bigbrain_fx.Options("naive", schedule="1f1b", micro_batches=4)
    made = bigbrain_fx.split(tmp_path / "letters.py", cluster(), tmp_path / "bundle", options)
    assert f"torch.{kind})" in (made.bundle / "device_d0.py").read_text()
    verify(made.bundle).require_passed()
