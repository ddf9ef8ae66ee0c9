"""Compiled stages compute what plain ones do, and say while they compile that they do."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import CompilerError, Stage, buffer, compiled, require_compiler

SIZE = 16


class Folding(Stage):
    returns = ("loss",)
    w: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(w=(SIZE, SIZE), seen=buffer(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(x @ self.w)
        self.seen.add_(x.detach().sum(0))
        return x.square().mean()


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as torch.compile does, but call no C++ compiler, which takes long."""

    def compile_(module: nn.Module, *, dynamic: bool) -> None:
        made = torch.compile(module._call_impl, backend="aot_eager", dynamic=dynamic)
        module._compiled_call_impl = made

    monkeypatch.setattr(nn.Module, "compile", compile_)
    yield
    torch.compiler.reset()


def two_runs(stage: Stage) -> list[Tensor]:
    found: list[Tensor] = []
    for step in range(2):
        x = torch.linspace(-1, 1 + step, 4 * SIZE).reshape(4, SIZE)
        found += torch.autograd.grad(stage(x=x), list(stage.parameters()))
    return [*found, *stage.buffers()]


@pytest.mark.nightly
@pytest.mark.usefixtures("_no_compiler")
def test_a_compiled_stage_computes_the_same_and_says_that_it_compiles() -> None:
    stages = [Folding.empty(torch.device("cpu")) for _ in range(2)]
    for stage in stages:
        stage.load_state_dict({"w": torch.eye(SIZE), "seen": torch.zeros(SIZE)})
    compiled.compile_stages(stages[1:])
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.utils import counters

    counters.clear()
    seen: list[bool] = []
    look = callback_handler.register_start_callback(lambda _: seen.append(compiled.is_compiling()))
    try:
        plain, quick = map(two_runs, stages)
    finally:
        callback_handler.remove_start_callback(look)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(plain, quick, strict=True))
    assert counters["stats"]["unique_graphs"] == 1  # no second one for the second run
    assert seen
    assert all(seen)
    assert not compiled.is_compiling()


def test_nothing_compiles_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_began", [time.monotonic()])
    assert compiled.is_compiling()
    monkeypatch.setattr(compiled, "LONGEST_COMPILE_S", 0.0)
    assert not compiled.is_compiling()


def test_a_host_that_cannot_compile_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_compiler("d0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerError, match=r"device d0.*no C\+\+ compiler 'no-such.*install g"):
        require_compiler("d0")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CompilerError, match=r"Python\.h: install Python's headers"):
        require_compiler("d0")
