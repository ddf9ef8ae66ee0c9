"""Statements of a forward as a module: what they take, give and keep."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.opaque.chosen_lines import (
    last_lines,
    lines_between_calls,
    state_lines,
)
from bigbrain_fx.frontend.tracing.opaque.forward_text import span_of
from bigbrain_fx.frontend.tracing.opaque.hoisting import hoisted
from bigbrain_fx.frontend.tracing.opaque.outlined import outlined
from tests.support.captured import assert_same


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h = self.a(x)", ["h = self.a(x)"]),
        ("return self.b(self.a(x))", ["a = self.a(x)", "return self.b(a)"]),
        ("y = f(self.a(x), self.b(x))", ["a = self.a(x)", "b = self.b(x)", "y = f(a, b)"]),
        ("return self.b(x + 1)", ["given = x + 1", "return self.b(given)"]),
        ("y = f(x) + self.a(x)", ["y = f(x) + self.a(x)"]),  # f may draw: it stays the first
        ("y = [self.a(x) for x in xs]", ["y = [self.a(x) for x in xs]"]),
        ("y = x if c else self.a(x)", ["y = x if c else self.a(x)"]),
    ],
)
def test_calls_of_modules_are_taken_out_in_the_order_of_evaluation(
    text: str, parts: list[str]
) -> None:
    (statement,) = ast.parse(text).body if "return" not in text else _of_function(text)
    found = hoisted(statement, "self", {"x", "y", "f", "xs", "c", "h"})
    assert [ast.unparse(each) for each in found] == parts


def _of_function(text: str) -> list[ast.stmt]:
    function = ast.parse(f"def forward():\n    {text}").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body


class Recurrent(nn.Module):
    """Goes on from the hidden state of the call before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = nn.Embedding(9, 6), nn.GRU(6, 8), nn.Linear(8, 9)
        self.hidden: Tensor | None = None
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(1, ids.shape[1], 8)
        x = self.embed(ids)
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        logits: Tensor = self.head(out)
        return logits.square().mean()


def test_statements_take_what_they_read_and_give_what_is_read_later() -> None:
    model = Recurrent()
    assert last_lines(model, "") == ["forward_6_6"]
    (path,) = state_lines(model)
    assert path == "forward_1_4_without_2"
    span = span_of(model, path)
    assert span is not None
    assert (span.given, span.left) == (["ids", "x"], ["out"])
    assert (span.uses, span.keeps) == (("rnn",), ("hidden",))


def test_between_calls_are_the_other_statements() -> None:
    assert lines_between_calls(Recurrent(), "") == ["forward_1_4_without_2", "forward_6_6"]


def test_an_outlined_model_computes_the_same_and_comes_back() -> None:
    model, again, ids = Recurrent(), Recurrent(), torch.arange(12).reshape(3, 4) % 9
    expected = [again(ids), again(ids)]
    with outlined(model, ["forward_1_4_without_2"]):
        assert type(model) is not Recurrent
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in again.named_parameters()]
        found = [model(ids), model(ids)]
    assert all(map(torch.equal, found, expected))
    assert type(model) is Recurrent
    assert model.hidden is None  # the lines have kept it
    assert not hasattr(model, "forward_1_4_without_2")


def test_state_in_the_forward_of_the_model_is_in_one_op() -> None:
    ids = torch.arange(12).reshape(4, 3) % 9
    found = capture(Recurrent(), {"ids": ids}, batch_dims={"ids": 1})
    (op,) = (op for op in found.graph.ops if op.target.startswith("leaf."))
    assert op.state == ("hidden",)
    assert set(op.params) == {n for n, _ in Recurrent().named_parameters() if n.startswith("rnn")}


class Warm(nn.Linear):
    """Grows with its calls."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * min(1.0, self.calls / 4)


class Looping(nn.Module):
    """Calls a module with state between lines that data decide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.big, self.b = nn.Linear(6, 20), Warm(20, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        times = int(float(h.detach().sum()) * 10) % 3 + 1
        h = self.big(h)
        for _ in range(times):
            h = h * 1.5
        h = h + 0
        y: Tensor = self.b(h)
        return y.square().mean()


def test_state_of_a_module_that_lines_call_is_theirs() -> None:
    found = capture(Looping(), {"x": torch.randn(8, 6)})
    (op,) = (op for op in found.graph.ops if op.target.startswith("leaf."))
    assert op.target.startswith("leaf.forward_")
    assert op.state == ("big.calls",)


class Queue(nn.Module):
    """Writes each batch's keys at a place that a buffer counts."""

    queue: Tensor
    at: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(5, 4), nn.Linear(5, 4)
        self.register_buffer("queue", torch.randn(4, 12))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(()))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        at = int(self.at)
        self.queue[:, at : at + keys.shape[0]] = keys.T
        self.at += keys.shape[0]
        self.at %= 12

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x).detach()
        logits = q @ self.queue.clone()
        self.enqueue(k)
        self.calls += 1
        return logits.logsumexp(1).mean()


def test_buffers_that_lines_write_are_the_models() -> None:
    model = Queue()
    found = capture(model, {"x": torch.randn(4, 5)})
    (op,) = (op for op in found.graph.ops if op.target.startswith("leaf."))
    assert {"queue", "at"} <= set(op.mutates)
    assert_same(model, found, model)
