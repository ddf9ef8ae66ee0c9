"""Whether what a trace assumes lasts: a branch on a buffer that forward writes may turn later.

    run the graph, run it again on what that left, and as it will be 10, 1000, 1000000 runs later

`if self.updates == 0:` is true once. A run would stop where it turns; it is refused before. One
batch, one seed, the same weights: nothing but buffers decides. It runs graphs; it traces nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.check import affordable, mutated
from bigbrain_fx.frontend.tracing.interpret import run_graph
from bigbrain_fx.frontend.translation.oracle import WrongAnswerError, assumptions

_CALLS = 4
_LATER = (10, 100, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000)
_MOST = 2**28  # bytes of buffers, which are copied


def require_lasting(found: Captured) -> None:
    """Refuse a graph whose assumptions hold for its first calls only.

    Raises:
        CaptureError: names the line, after how many calls it turns, and a buffer that counts.
    """
    graph = found.graph
    rows = graph.static_batch or found.batch.rows
    names = {name for op in graph.ops for name in mutated(op)} & found.tensors.keys()
    written = {name: found.tensors[name] for name in names}
    if not written or not any(assumptions(graph)) or not affordable(graph, (rows,)):
        return
    if (
        any(map(is_blank, found.tensors.values()))
        or sum(t.nbytes for t in written.values()) > _MOST
    ):
        return
    state = {name: tensor.detach().clone() for name, tensor in written.items()}
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # of kept code of the user's
        turned = _Calls(found, rows, state).turned()
        if turned is not None:
            raise turned


@dataclass(frozen=True)
class _Calls:
    """Calls of a graph, each on the buffers that the one before has left."""

    found: Captured
    rows: int
    state: dict[str, Tensor]

    def turned(self) -> CaptureError | None:
        """Say what goes otherwise, at one of the next calls or much later."""
        if self._wrong(self.state) is not None:
            return None  # at once: others say so
        looks = [look(self.state)]
        for calls in range(1, _CALLS):
            wrong = self._wrong(self.state)
            if wrong is not None:
                return _turns(wrong, calls)
            looks.append(look(self.state))
        return self._later(counting(looks))

    def _later(self, counters: Mapping[str, float]) -> CaptureError | None:
        for calls in _LATER if counters else ():
            state = {name: tensor.clone() for name, tensor in self.state.items()}
            for name, by in counters.items():
                state[name] += torch.tensor(by * calls, dtype=state[name].dtype)
            wrong = self._wrong(state)
            if wrong is not None:
                return _turns(wrong, calls)
        return None

    def _wrong(self, state: Mapping[str, Tensor]) -> WrongAnswerError | None:
        """Run the graph; return what an assumption says that does not hold."""
        inputs = {name: tensor.clone() for name, tensor in self.found.inputs(self.rows).items()}
        tensors = {**self.found.tensors, **state}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                run_graph(self.found.graph, tensors, inputs, functions=self.found.functions)
        except WrongAnswerError as error:
            return error
        return None


def look(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers of tensors of one element."""
    plain = {name: t for name, t in state.items() if t.numel() == 1 and not t.is_complex()}
    return {name: float(tensor) for name, tensor in plain.items()}


def counting(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what goes on by the same step from each look to the next -> that step."""
    found = {}
    for name, first in looks[0].items():
        steps = {after[name] - before[name] for before, after in pairwise(looks)}
        if len(steps) == 1 and steps != {0.0}:
            found[name] = looks[1][name] - first
    return found


def _turns(error: WrongAnswerError, calls: int) -> CaptureError:
    averages = "update_parameters" in str(error)
    return CaptureError(
        f"{error}. That is so {calls} call{'s' if calls > 1 else ''} later, with the same "
        "batch: it goes by a buffer that forward writes, and a run would stop there",
        code="BX0102",
        at=error.at or None,
        help=_OF_AVERAGES if averages else _HELP,
    )


_HELP = (
    "compute both ways as tensors and choose by the buffer: torch.where(self.calls < 200, early, "
    "late); what is done at the first call only, let model() do: run the model once there; or let "
    "the batch bring a tensor that decides"
)
_OF_AVERAGES = (
    "call update_parameters once in model(): its first call copies, all others average; or average "
    "by hand, under torch.no_grad(): t.lerp_(s, 0.1) for each pair of parameters"
)
