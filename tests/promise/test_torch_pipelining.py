"""What torch.distributed.pipelining gets wrong and a bundle gets right.

The tests of torch's own behaviour assert that it still fails. When one of them breaks because a new
torch has mended it, that is good news: drop the test, and the sentence in the README that names it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

import bigbrain_fx
from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.plan import Options
from models import gpt, llama
from tests.support.bundles import cluster

MENDED = "this torch splits RoPE models: pytorch#184361 is mended, see this file's docstring"

TIED_MODEL = '''"""GPT without dropout, so that torch's pipeline can be held against it."""
import sys

sys.path.insert(0, {root!r})
from models.gpt import GPT, example_batch, loss  # noqa: E402, F401


def model() -> GPT:
    """Build it."""
    return GPT(dropout=0.0)
'''


def at_the_middle(model: nn.Module, *inputs: Tensor) -> Pipe:
    return pipeline(model, mb_args=inputs, split_spec={"blocks.2": SplitPoint.BEGINNING})


def refusal(model: nn.Module, *inputs: Tensor) -> str:
    """Say why torch cannot split and run a model; nothing where it can."""
    try:
        at_the_middle(model, *inputs)(*inputs)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.nightly
def test_torch_cannot_split_a_rope_model() -> None:
    """cos and sin are made once and read by every layer; torch's splitter loses them (#184361)."""
    torch.manual_seed(0)
    model, batch = llama.model(), llama.example_batch()
    inputs = batch["tokens"], batch["targets"]
    assert "Expected positional argument for parameter" in refusal(model, *inputs), MENDED


@pytest.fixture(scope="module")
def tied() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A GPT, a batch, and the gradient of its embedding, which is its head too."""
    torch.manual_seed(0)
    model, batch = gpt.GPT(dropout=0.0), gpt.example_batch()
    loss = gpt.loss(model(batch["tokens"]), batch)
    (gradient,) = torch.autograd.grad(loss, [model.embed.weight])
    return model, batch, gradient


def off(found: Tensor | None, want: Tensor) -> float:
    """Return how far a gradient is off, as a share of the right one's norm."""
    assert found is not None
    return float((found - want).norm() / want.norm())


def test_torch_trains_tied_weights_apart(
    tied: tuple[nn.Module, dict[str, Tensor], Tensor],
) -> None:
    """Its stages hold a copy each; each gets the gradient of its own use, and nobody adds them."""
    model, batch, want = tied
    pipe = at_the_middle(model, batch["tokens"])
    first, last = (pipe.get_stage_module(i) for i in range(2))
    embed, head = first.get_parameter("embed.weight"), last.get_parameter("head.weight")
    assert torch.equal(embed, head)
    assert embed is not head
    gpt.loss(last(first(batch["tokens"])), batch).backward()
    assert off(embed.grad, want) > 0.5, "torch sums tied gradients now, see this file's docstring"
    assert off(head.grad, want) > 0.3

    torch.optim.SGD([embed, head], lr=0.1).step()
    assert not torch.equal(embed, head)  # from here on they are two weights


@pytest.mark.nightly
def test_a_bundle_trains_them_as_one(
    tied: tuple[nn.Module, dict[str, Tensor], Tensor], tmp_path: Path
) -> None:
    """Both devices have the unsplit model's gradient, and still the same weight after a step."""
    model, _, want = tied
    root = str(Path(gpt.__file__).resolve().parents[1])
    (tmp_path / "tied_gpt.py").write_text(TIED_MODEL.format(root=root))
    options = Options("naive", micro_batches=1)
    made = bigbrain_fx.split(tmp_path / "tied_gpt.py", cluster(), tmp_path / "b", options)
    start = load_file(made.bundle / "weights" / "d0.safetensors")["embed.weight"]
    assert torch.equal(start, model.get_parameter("embed.weight"))

    folders = tmp_path / "gradients", tmp_path / "tensors"
    choices = RunOptions(1, first_gradients=folders[0], save=folders[1], deadline_s=60.0)
    run(made.bundle, choices)
    gradients, tensors = (
        [load_file(folder / f"d{i}.safetensors") for i in range(2)] for folder in folders
    )
    assert all(off(part["embed.weight"], want) < 1e-6 for part in gradients)
    assert torch.equal(gradients[0]["embed.weight"], gradients[1]["embed.weight"])
    assert torch.equal(tensors[0]["embed.weight"], tensors[1]["head.weight"])
    assert not torch.equal(tensors[0]["embed.weight"], start)
