"""The emitted Llama stage beside a hand-written one: as long, same classes, same numbers."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import nn

from models import llama
from tests.support import handwritten_llama, samples

LONGER = 1.3  # times as many lines of code as a person needs, at most


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return samples.texts("llama", "chain-dp", 2, "1f1b", 4)


@pytest.fixture(scope="module")
def emitted(texts: dict[str, str]) -> str:
    return samples.with_blocks(texts, "device_d0.py")


def code(text: str) -> dict[str, list[str]]:
    """Return the statements of each class and function, docstrings and comments left out."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(inner):
                    inner.body = inner.body[1:]
            found[node.name] = ast.unparse(node).splitlines()
    return found


@pytest.mark.nightly
def test_it_is_hardly_longer(emitted: str) -> None:
    own = {name: lines for name, lines in code(emitted).items() if not name.startswith("Device")}
    theirs = code(inspect.getsource(handwritten_llama))
    count, expected = (sum(map(len, found.values())) for found in (own, theirs))
    assert count <= LONGER * expected, (count, expected)
    assert set(own) == set(theirs) - {"rotate"}  # a function of the model's is written out


@pytest.mark.parametrize("name", ["RMSNorm", "FeedForward", "Block"])
def test_classes_are_written_alike(emitted: str, name: str) -> None:
    """Line by line the same, but for two ways to write a square and a mean."""
    theirs = "\n".join(code(inspect.getsource(handwritten_llama))[name])
    theirs = theirs.replace("x.pow(2).mean(-1,", "(x ** 2).mean(dim=-1,")
    assert "\n".join(code(emitted)[name]) == theirs


def test_both_give_the_same_numbers(texts: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, tokens = llama.model(), llama.example_batch()["tokens"]
    with samples.shared_blocks(texts):
        module = samples.loaded(texts["device_d0.py"], "device_d0")
    stages: list[nn.Module] = [module.Stage0(), handwritten_llama.Stage0()]
    weights = {**model.state_dict(), "rotary.frequencies": model.get_buffer("rotary.frequencies")}
    for stage in stages:
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    results = [stage(tokens) for stage in stages]
    assert torch.equal(*results)
    for result in results:
        result.square().mean().backward()
    first, second = (dict(stage.named_parameters()) for stage in stages)
    assert sorted(first) == sorted(second)
    for name, parameter in first.items():
        other = second[name].grad
        assert parameter.grad is not None
        assert other is not None
        assert torch.equal(parameter.grad, other), name
