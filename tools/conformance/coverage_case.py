"""One case of the coverage table, in a process of its own: capture, split, train, compare.

`examine` returns plain data (`tools.conformance.coverage.Row` without the names). It knows the
doors of the rooms, as `compile.split` and `verify` do; the model is captured once for all its
splits.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from bigbrain_fx.core import Cluster, Device, Graph, Link
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import Captured, ModelFile, capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.planning.registry import preset
from bigbrain_fx.verification.chain import chain
from tools.conformance.forked import fork
from tools.conformance.matrix import run_processes
from tools.conformance.zoo import Case

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = (60e9, 30e9, 45e9)  # FLOP/s: unlike devices, so that the cuts differ from naive's
CELLS = tuple(itertools.product(("naive", "analytical"), (2, 3)))
FAST_CELLS = (("naive", 2), ("analytical", 3))
MICRO_BATCHES = 2
STEPS = 2
GROWTH = 1.15  # twice the layers may add so much: a cut inside a block shows it once more
_FILE = '''"""The case {name} of the zoo."""
import sys

sys.path.insert(0, {root!r})
from tools.conformance.zoo import find  # noqa: E402

CASE = find({name!r})


def model():
    return CASE.model({times})


example_batch = CASE.example_batch
{optional}
'''


class WrongNumbersError(Exception):
    """Report a bundle that does not compute what the model computes."""


@dataclass(frozen=True)
class Bench:
    """A captured case: its own session for `write_bundle`."""

    file: ModelFile
    captured: Captured
    capture_s: float

    @staticmethod
    def of(case: Case, folder: Path, times: int = 1) -> Bench:
        """Write a model file that imports the case, load and capture it."""
        file = load_model_file(model_file(case, folder, times))
        start = time.perf_counter()
        captured = _captured(file, None)
        if (rows := _other_rows(captured.graph)) is not None:
            captured = _captured(file, rows)
        return Bench(file, captured, time.perf_counter() - start)

    def plan(self, partitioner: str, devices: int) -> Plan:
        """Plan one split."""
        file = self.file
        source = Source(str(file.path), has_loss=file.loss is not None, module=file.path.stem)
        method, costs = preset(partitioner)
        options = Options(method, costs, micro_batches=MICRO_BATCHES)
        return make_plan(self.captured.graph, cluster(devices), source, options)

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write the model's tensors."""
        for name, tensors in files.items():
            save_file({t: _own(self.captured.tensors[t]) for t in tensors}, folder / name)

    def write_batch(self, path: Path) -> None:
        """Write the example batch."""
        save_file({name: _own(value) for name, value in self.captured.inputs().items()}, path)


def examine(case: Case, depth: str) -> dict[str, object]:
    """Do everything with one case, or as much as `depth` says: "whole", "fast" or "capture".

    Errors become a status and a detail.
    """
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix=f"coverage-{case.name}-") as scratch:
        try:
            bench = _captured_case(case, Path(scratch), found)
            found["status"] = "captured"
            if depth != "capture":
                _examine(case, bench, depth == "fast", Path(scratch), found)
                found["status"] = "verified"
        except BigBrainError as error:
            found["status"], found["detail"] = _judged(error), f"{type(error).__name__}: {error}"
        except WrongNumbersError as error:
            found["status"], found["detail"] = "failed", str(error)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            where = traceback.format_exc()
            found["status"] = "failed"
            found["detail"] = f"{type(error).__name__}: {first}\n{where}"
    return found


def _judged(error: BigBrainError) -> str:
    """A refusal names the user's line and says what to do; any other error is a failure."""
    kind = isinstance(error, CaptureError | InputError)
    return "refused" if kind and error.at and error.help else "failed"


def _captured_case(case: Case, scratch: Path, found: dict[str, object]) -> Bench:
    bench = Bench.of(case, scratch)
    found["capture_s"] = round(bench.capture_s, 3)
    found["ops"] = len(bench.captured.graph.ops)
    found["detail"] = "; ".join(bench.captured.warnings)
    return bench


def _examine(case: Case, bench: Bench, fast: bool, scratch: Path, found: dict[str, object]) -> None:
    lines: dict[str, list[int]] = {}
    found["device_lines"] = lines
    for partitioner, devices in FAST_CELLS if fast else CELLS:
        plan = bench.plan(partitioner, devices)
        cell = f"{partitioner}/{devices}"
        texts = bundle_texts(plan)
        lines[cell] = device_lines(texts)
        found["lines"] = max(number for numbers in lines.values() for number in numbers)
        in_fork(lambda plan=plan, cell=cell: check(bench, plan, scratch / cell, not fast), cell)
    found["grows"] = grows(case, bench, scratch)


def check(bench: Bench, plan: Plan, folder: Path, processes: bool) -> None:
    """Write one bundle, train it, and compare the whole chain.

    Raises:
        WrongNumbersError: names the first link of the chain that does not hold.
    """
    folder.mkdir(parents=True)
    bundle = write_bundle(plan, bench, folder / "bundle")
    traced = run_processes(bundle, folder, STEPS, fork) if processes else None
    checks = chain(bench.file, bench.captured, plan, bundle, STEPS, traced)
    wrong = [f"{c['name']}: {c['detail']}" for c in checks if not c["passed"]]
    if wrong:
        raise WrongNumbersError("; ".join(wrong))


def grows(case: Case, bench: Bench, scratch: Path) -> bool | None:
    """Say whether twice the layers make longer device files on the same split."""
    if not case.depth:
        return None
    folder = scratch / "twice"
    folder.mkdir()
    twice = Bench.of(case, folder, times=2)
    short, long = (sum(device_lines(bundle_texts(b.plan("naive", 2)))) for b in (bench, twice))
    return long > GROWTH * short


def device_lines(texts: Mapping[str, str]) -> list[int]:
    """Count the lines of each file with classes."""
    found = (
        text for name, text in sorted(texts.items()) if name.startswith(("device_", "model_blocks"))
    )
    return [len(text.splitlines()) for text in found]


def model_file(case: Case, folder: Path, times: int = 1) -> Path:
    """Write the model file of a case, as small as a user's."""
    given = {"loss": case.loss, "autocast": case.autocast, "leaves": case.leaves}
    optional = "\n".join(f"{name} = CASE.{name}" for name, value in given.items() if value)
    name = f"case_{case.name.replace('-', '_')}_{times}"
    path = folder / f"{name}.py"
    path.write_text(_FILE.format(name=case.name, root=str(ROOT), times=times, optional=optional))
    return path


def cluster(count: int) -> Cluster:
    """Return `count` unlike CPU devices; on slower links tiny models would stay on one device."""
    made = (Device(f"d{i}", "h", "cpu", 2**33, s, 12e9, 1e-6) for i, s in enumerate(SPEEDS))
    return Cluster(tuple(itertools.islice(made, count)), Link(1e-8, 1e12))


def _captured(file: ModelFile, rows: int | None) -> Captured:
    return capture(
        file.model,
        file.example_batch,
        file.loss,
        micro_batch=rows,
        autocast=file.autocast,
        leaves=file.leaves,
    )


def _other_rows(graph: Graph) -> int | None:
    """Rows to trace again with, where a trace has one size only, as `compile` does."""
    rows = graph.batch // MICRO_BATCHES
    return rows if graph.static_batch not in (None, rows) else None


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().clone()


def in_fork(work: object, cell: str) -> None:
    """Run in a copy of this process: imported bundles and moved buffers stay there.

    Raises:
        WrongNumbersError: it failed there, for whatever reason.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            work()  # type: ignore[operator]  # a function without arguments
        except BaseException as error:  # reported by the parent
            text = f"{cell}: {type(error).__name__}: {error}"
            if not isinstance(error, BigBrainError | WrongNumbersError):
                text += f"\n{traceback.format_exc()}"
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise WrongNumbersError(f"{cell}: its process ended with {status}")
    if text:
        raise WrongNumbersError(text)
