"""Every model that ships is captured with a free batch size, and equals itself bit by bit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    capture,
    graph_inputs,
    load_model_file,
    run_graph,
)
from bigbrain_fx.frontend.tracing.step import Step, route
from bigbrain_fx.planning.units import units

MODELS = Path(__file__).parents[2] / "models"
FILES = sorted(path.name for path in MODELS.glob("[a-z]*.py"))


@lru_cache(maxsize=1)  # the tests of one model follow each other
def captured(name: str) -> tuple[ModelFile, Captured]:
    file = load_model_file(MODELS / name)
    return file, capture(file.model, file.example_batch, file.loss, autocast=file.autocast)


def pytest_generate_tests(metafunc: Any) -> None:
    metafunc.parametrize("name", FILES, scope="module")


@pytest.mark.gate("digits.py")
def test_graph_says_what_is_computed(name: str) -> None:
    file, found = captured(name)
    graph = found.graph
    assert found.warnings == ()
    assert graph.static_batch is None
    assert graph.loss
    assert set(graph_inputs(graph, file.example_batch)) == set(graph.input)
    state = {key: value.clone() for key, value in file.model.state_dict().items()}
    names = [op.name for op in graph.ops]
    values = run_graph(graph, found.tensors, found.inputs(3), values=names)
    file.model.load_state_dict(state)
    for op in graph.at(3).ops:
        value = values[op.name]
        items = value if isinstance(value, list | tuple) else [value]
        specs = [
            (tuple(item.shape), item.stride(), item.requires_grad)
            for item in items
            if isinstance(item, Tensor)
        ]
        assert specs == [(s.shape, s.strides, s.requires_grad) for s in op.outputs], op


@pytest.mark.gate("digits.py")
def test_json_round_trip_and_units(name: str) -> None:
    graph = captured(name)[1].graph
    assert TypeAdapter(Graph).validate_json(TypeAdapter(Graph).dump_json(graph)) == graph
    groups = units(graph.at(2))
    placed = [op for group in groups.groups for op in group]
    assert sorted([*placed, *groups.replicated]) == sorted(op.name for op in graph.ops)


@pytest.mark.gate("digits.py")
def test_loss_and_gradients_are_the_modules(name: str) -> None:
    file, found = captured(name)
    parameters = list(file.model.parameters())
    how = route(file.model, file.example_batch, file.loss is not None)
    step = Step(file.model.train(), file.loss, found.batch, how)
    state = {key: value.clone() for key, value in file.model.state_dict().items()}
    torch.manual_seed(5)
    ours = run_graph(found.graph, found.tensors, found.inputs())[found.graph.loss or ""]
    assert isinstance(ours, Tensor)
    our_gradients = torch.autograd.grad(ours, parameters, allow_unused=True, materialize_grads=True)
    file.model.load_state_dict(state)
    torch.manual_seed(5)
    theirs = step(*found.inputs().values())[0]
    their_gradients = torch.autograd.grad(
        theirs, parameters, allow_unused=True, materialize_grads=True
    )
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, our_gradients, their_gradients))
