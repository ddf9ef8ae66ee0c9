"""A rehearsal: the user's untouched loop beside the bundle that was just written, for a few steps.

    before the file is run ─▶ forks wait ─▶ the file is run, traced, planned, written
                                └─▶ the loop, and the bundle: processes that have not run it
    loop = graph = one process = bundle: losses, gradients, buffers and weights of each step

A module in memory is in the loop's fork as it was before it was captured; it trains on the example.
Its bundle trains in a new Python, as its devices will be.
Different numbers show side effects of model() and state that one function of the file leaves for
another. They also show a different copy of the file in the bundle, and changing values in a trace.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import Captured, CaptureService, ModelFile, apart, asked_at
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.processes import Forking
from bigbrain_fx.verification.alone import Alone, Way
from bigbrain_fx.verification.chain import opaque_chain, rehearsed_links
from bigbrain_fx.verification.eager import load_there
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.imported_bundle import weights_of
from bigbrain_fx.verification.loop import Load, PlainLoop, lacking
from bigbrain_fx.verification.plain import STEPS


class Rehearsal:
    """Forks of a process that has not run the model file yet; they wait for a bundle.

    Two sets of them: with lines of the model file, and with all of it.

    Args:
        is_expected: whether they will be asked: the answer may be known.
    """

    def __init__(self, *, is_expected: bool = True) -> None:
        self.waiting = [Waiting(is_expected=is_expected) for _ in range(2)]

    def compare(self, service: CaptureService, request: Mapping[str, Any]) -> dict[str, object]:
        """Train a few steps both ways; return what `rehearsed` does.

        Args:
            service: has the captured model.
            request: "bundle", a folder; "limit_s", for all of it.

        """
        folder, limit_s = Path(request["bundle"]), float(request["limit_s"])
        with self.waiting.pop() as forks:
            return rehearsed(service.file, service.captured, folder, forks, limit_s)


def rehearsed(
    file: ModelFile, captured: Captured, folder: Path, forks: Waiting, limit_s: float
) -> dict[str, object]:
    """Train a few steps both ways; return the links as "checks", or "why" there are none.

    Or "refused", the error by which the bundle cannot be trained on the user's data. Of a
    difference "apart" is the path of the module that first has another result, where it is known.

    Args:
        file: the model file as this process has it, or a module in memory as if it were one.
        captured: its capture, of which the bundle was made.
        folder: of the bundle.
        forks: they know what the loop trains; they are used once.
        limit_s: for all of it.
    """
    plan = read_plan(folder)
    why = lacking(plan)
    if why:
        return {"checks": [], "why": why}
    return _Comparison(file, captured, plan, folder, forks).run(limit_s)


class Waiting:
    """A loop and a bundle's process, before either has run anything; a context manager.

    Args:
        load: returns what the loop trains.
        is_expected: as of `PlainLoop`.
        forking: as of `Alone`.
    """

    def __init__(
        self,
        load: Load = load_there,
        *,
        is_expected: bool = True,
        forking: Forking | None = None,
    ) -> None:
        self.loop = PlainLoop(load, is_expected=is_expected)
        self.alone = Alone(forking)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        self.alone.close()


@dataclass(frozen=True)
class _Comparison:
    """One bundle and what it is compared with."""

    file: ModelFile
    captured: Captured
    plan: Plan
    folder: Path
    forks: Waiting

    @property
    def path(self) -> Path | None:
        """The user's file of Python; None where there is none."""
        return None if self.file.is_data else self.file.path

    def run(self, limit_s: float) -> dict[str, object]:
        """Compare, in a fork of the process that has the captured model."""
        found = apart(self._links, limit_s)
        if found is None:
            return {"checks": [], "why": f"it takes longer than {limit_s:g} s here"}
        answer: dict[str, Any] = json.loads(found["answer"])
        return answer

    def _links(self) -> dict[str, str]:
        of_set = None if self.path is None else line_of_set(self.path)
        try:
            checks = self._compared(of_set)
            named = next((check["apart"] for check in checks if "apart" in check), None)
            answer: dict[str, Any] = {"checks": checks, "set": of_set, "apart": named}
        except BigBrainError as error:
            answer = {"checks": [], "refused": error.fields}
        except Exception as error:
            known = error_of(error, self.folder, self.path)
            answer = {"checks": [], "why": f"{type(error).__name__}: {error}"}
            if known:
                asked = asked_at(self.plan.graph, known.at or "")
                answer = {"checks": [], "refused": known.fields, "apart": asked}
        if "refused" in answer or any(c["passed"] is False for c in answer["checks"]):
            answer = self._unseeded() or answer
        return {"answer": json.dumps(answer)}

    def _unseeded(self) -> dict[str, Any] | None:
        """Say of a difference that it may be of dice which no line has seeded."""
        at = None if self.path is None else line_of_draw(self.path)
        if self.path is None or at is None:
            return None
        error = InputError(
            f"the top of {self.path.name} draws with Python's or NumPy's random numbers, without a "
            "seed, and processes of a bundle, which draw others, do not train as your own loop",
            code="BX2046",
            at=at,
            help="seed them at the top, before they draw: random.seed(0), numpy.random.seed(0); or "
            "draw in batches(seed), by its seed",
        )
        return {"checks": [], "refused": error.fields}

    def _compared(self, of_set: str | None) -> list[dict[str, object]]:
        plan, folder, forks = self.plan, self.folder, self.forks
        is_opaque = plan.graph.is_opaque_step
        numbers = None if is_opaque else weights_of(folder, plan)
        forks.loop.begin(plan, folder, self.file.location, numbers)
        if is_opaque:
            return opaque_chain(plan, folder, STEPS, forks.loop, forks.alone)
        how = Way(by_processes=True, other_hashes=of_set is not None)
        return rehearsed_links(self.file, self.captured, plan, folder, forks.loop, forks.alone, how)


SETS = frozenset({"set", "frozenset", "hash"})
UNORDERED = frozenset({"sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset"})
HASH_SEED = "PYTHONHASHSEED"


def line_of_set(path: Path) -> str | None:
    """Return the first such line; None where a PYTHONHASHSEED of the user's holds for all."""
    if os.environ.get(HASH_SEED, "random") != "random":
        return None
    line = next(lines_of_sets(path), None)
    return None if line is None else f"{path.name}:{line}"


def line_of_draw(path: Path) -> str | None:
    """Return the first line at the top that draws without a seed; None where one is set there."""
    body = ast.parse(path.read_bytes()).body
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    calls = [c for node in body if not isinstance(node, defined) for c in _calls_of_random(node)]
    if any(name.endswith("seed") for name, _ in calls):
        return None
    return next((f"{path.name}:{line}" for _, line in calls), None)


def _calls_of_random(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the functions of `random` and `numpy.random` that a statement calls."""
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        name = ast.unparse(call.func)
        if name.removeprefix("np.").removeprefix("numpy.").startswith("random."):
            yield name, call.lineno


def lines_of_sets(path: Path) -> Iterator[int]:
    """Yield the lines on which a file makes a set, or a hash, whose order may count."""
    tree = ast.parse(path.read_bytes())
    harmless = {id(part) for node in ast.walk(tree) for part in _harmless(node)}
    for node in ast.walk(tree):
        if _may_count(node) and id(node) not in harmless:
            yield node.lineno  # type: ignore[attr-defined]  # an expression has a line


def _may_count(node: ast.AST) -> bool:
    match node:
        case ast.Set(elts=items):
            return not all(isinstance(i, ast.Constant) and isinstance(i.value, int) for i in items)
        case ast.Call(func=ast.Name(id=name)):
            return name in SETS
    return isinstance(node, ast.SetComp)


def _harmless(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression whose order it does not show."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in UNORDERED:
            yield first
        case ast.Compare(ops=ops, comparators=parts):
            yield from (
                p for op, p in zip(ops, parts, strict=True) if isinstance(op, ast.In | ast.NotIn)
            )
