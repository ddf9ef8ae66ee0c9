"""Lines that only print or log numbers of tensors are left out of a trace, and said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.lines.untraced_queries import only_says

LOG = logging.getLogger(__name__)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.kept = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Same.apply(self.head(x))  # type: ignore[no-untyped-call]
        print(f"most {h.max():.3f}", h.mean().item(), h[0].tolist())
        LOG.warning(
            "norm %.3f of %s",
            float(h.norm()),
            round(h.std().item(), 2),
        )
        return h


class Keeps(Says):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Same.apply(self.head(x))  # type: ignore[no-untyped-call]
        self.kept = f"{h.max():.3f}"
        return h


def square(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def test_prints_and_logs_are_left_out_with_a_note() -> None:
    found = capture(Says(), torch.randn(6, 4), square)
    assert found.graph.static_batch is None
    said = [line for line in found.warnings if "only prints or logs" in line]
    assert [line.partition(":")[0] for line in said] == ["test_said.py"] * 2


def test_kept_values_are_not_left_out() -> None:
    found = capture(Keeps(), torch.randn(6, 4), square)
    assert not any("only prints or logs" in line for line in found.warnings)


LINES = """
print(h.max().item())
print("%.3f" % h.mean(), torch.norm(h).item(), str(round(float(h[0]), 3)))
if seen:
    log.info(
        "mean %g",
        h.mean().item(),
    )
warnings.warn(f"{h.max():.2f}")
sys.stderr.write("{:.2f}".format(h.max()))
print(most := h.max().item())
print(self.note(h.max().item()))
print(h.add_(1).max().item())
self.write(h.max().item())
mean = h.mean().item(); print(mean)
most = print(h.max().item())
kept.append(h.max().item())
if h.max().item() > 3: print(h.max().item())
"""


def test_only_statements_that_do_nothing_else_count(tmp_path: Path) -> None:
    path = tmp_path / "lines.py"
    path.write_text(LINES)
    said = {number for number in range(1, 20) if only_says(str(path), number)}
    assert only_says(str(path), 7) == 5
    assert said == {2, 3, 5, 6, 7, 8, 9, 10}
