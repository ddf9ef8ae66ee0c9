"""The child process of an ONNX export: it imports the bundle, runs it once, exports each stage.

Run as `python -m bigbrain_fx.bundles.onnx_export.child '{"bundle": ...}'`; its one message has the
result of each stage. The process uses the bundle as any user does: by its infer.py and runtime.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from bigbrain_fx.bundles.onnx_export import StageFile
from bigbrain_fx.bundles.onnx_export.compare import OnnxSession, largest_difference
from bigbrain_fx.core import Graph, TensorSpec
from bigbrain_fx.emit import StageText, stage_texts
from bigbrain_fx.frontend import Replies
from bigbrain_fx.plan import Plan, read_plan, roots

if TYPE_CHECKING:  # what runs is the bundle's own copy
    from bigbrain_fx.runtime import InferenceDevice

ONE_FILE_BYTES = 1_500_000_000  # a protobuf file holds 2 GiB: above this weights go beside it
_OP = re.compile(r"(?:op='|OpOverload\(op='|node: )?\b((?:aten|prims|torchvision|custom)\.[\w.]+)")


def main() -> None:
    """Export as asked on the command line; report what came of it."""
    wanted, replies = json.loads(sys.argv.pop()), Replies()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # torch.onnx tells its steps there
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    def work() -> Mapping[str, object]:
        folders = Path(wanted["bundle"]), Path(wanted["folder"])
        return {"stages": [asdict(each) for each in export_stages(*folders, wanted["tolerance"])]}

    replies.reply(work)


def export_stages(bundle: Path, folder: Path, tolerance: float) -> list[StageFile]:
    """Export every stage of a bundle; one that fails does not keep the others."""
    plan = read_plan(bundle)
    texts = {text.stage.index: text for text in stage_texts(plan)}
    sys.path.insert(0, str(bundle))
    module = importlib.import_module("infer")
    rows = plan.graph.static_batch or plan.rows
    if plan.graph.static_batch is None:
        rows = max(2, rows)  # torch.export takes a size of 1 for a constant
    calls = calls_of(module, texts, rows)
    others = calls_of(module, texts, rows + 1) if plan.graph.static_batch is None else {}
    found = [
        _StageExport(plan, texts[index], calls[index], others.get(index), folder, tolerance).run()
        for index in sorted(calls)
    ]
    _write_stages(plan, found, folder / "stages.json")
    return found


# --------------------------------------------------------------------------- what stages compute


@dataclass(frozen=True)
class StageCall:
    """One call of a stage: its module, and what went in and came out, by the graph's names."""

    module: nn.Module
    arguments: Mapping[str, Tensor]
    results: Mapping[str, Tensor]


def calls_of(bundle: ModuleType, texts: Mapping[int, StageText], rows: int) -> dict[int, StageCall]:
    """Run every stage on the first rows of the bundle's data.

    Args:
        bundle: its infer.py.
        texts: what the stages' arguments and results are called.
        rows: how many; the first are repeated where the data has fewer.
    """
    b, runtime = bundle.INFERENCE, importlib.import_module("runtime.infer")
    devices: Sequence[InferenceDevice] = runtime.loaded(b)
    modules = {number: m for device in devices for number, m in device.modules.items()}
    values = _first_rows(devices[0], b.whole, rows)
    found: dict[int, StageCall] = {}
    for number, text in sorted(texts.items()):
        arguments = {value: values[value] for value in text.arguments}
        with torch.no_grad():
            result = modules[number](*arguments.values())
        results = result if isinstance(result, tuple) else (result,)
        found[number] = StageCall(
            modules[number], arguments, dict(zip(text.results, results, strict=True))
        )
        values.update(found[number].results)
    return found


def _first_rows(device: InferenceDevice, whole: Sequence[str], rows: int) -> dict[str, Tensor]:
    stream = device.stream
    stream.advance(0)
    found = {}
    for name in stream.inputs:
        value = stream.get(name, 0)
        if name not in whole:
            value = torch.cat([value] * -(-rows // value.shape[0]))[:rows]
        found[name] = value.clone()
    return found


# --------------------------------------------------------------------------- one stage


@dataclass(frozen=True)
class _StageExport:
    """The export of one stage."""

    plan: Plan
    text: StageText
    call: StageCall
    other: StageCall | None
    folder: Path
    tolerance: float

    def run(self) -> StageFile:
        """Export, check and run it; a failure becomes the `problem` of the answer."""
        start, stage = time.perf_counter(), self.text.stage
        path = self.folder / f"stage_{stage.index}.onnx"
        difference, other_rows, problem = None, False, ""
        try:
            self._export(path)
            onnx.checker.check_model(str(path))
            difference, other_rows = self._compare(path)
        except Exception as error:
            problem = self._explained(error)
        if difference is not None and not difference <= self.tolerance:
            problem = f"{path.name} differs by {difference:.1e} of max(1, |value|) from the stage"
        seconds = time.perf_counter() - start
        file = path.name if path.exists() else None
        return StageFile(stage.index, stage.device, file, difference, other_rows, problem, seconds)

    def _export(self, path: Path) -> None:
        graph, call = self.plan.graph, self.call
        shapes = tuple(_free(spec_of(graph, value)) for value in call.arguments)
        nbytes = sum(t.nbytes for t in call.module.state_dict().values())
        with torch.no_grad():
            program = torch.onnx.export(
                call.module,
                tuple(call.arguments.values()),
                dynamo=True,
                dynamic_shapes=shapes,
                verbose=False,
            )
        assert program is not None
        _name(program.model.graph, list(call.arguments), list(call.results))
        program.save(path, external_data=nbytes > ONE_FILE_BYTES)

    def _compare(self, path: Path) -> tuple[float | None, bool]:
        """Run the file on what the stage got; say whether other numbers of rows work, too."""
        if find_spec("onnxruntime") is None:
            return None, False
        session = OnnxSession.of(path)
        difference = largest_difference(self.call.results, session.run(self.call.arguments))
        if self.other is None:
            return difference, False
        try:
            found = session.run(self.other.arguments)
        except Exception:  # whatever ONNX Runtime raises: the file has one size only
            return difference, False
        return max(difference, largest_difference(self.other.results, found)), True

    def _explained(self, error: Exception) -> str:
        """Say which op stands in the way, and in which line of the user's."""
        messages = _messages(error)
        target = next((m.group(1) for text in messages for m in _OP.finditer(text)), None)
        first = next((line.strip() for line in messages[-1].splitlines() if line.strip()), "")
        if target is None:
            return f"{type(error).__name__}: {first[:200]}"
        family = target.split(".")[1]
        ops = [self.plan.graph.op[name] for name in self.text.stage.ops]
        # torch may have taken the op apart before it met what ONNX lacks: special_j1 into j1
        ours = [op for op in ops if (op.target.split(".") * 2)[1].endswith(family)]
        lines = list(dict.fromkeys(op.source for op in ours if op.source))
        where = f" ({', '.join(lines[:3])})" if lines else ""
        return f"ONNX has no {ours[0].target if ours else target}{where}"


def _name(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:  # noqa: ANN401  # onnx_ir
    """Give a graph's inputs and outputs these names; an inner value of such a name gets another."""
    ends = [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]
    taken = {*inputs, *outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}.inner"
    for value, name in ends:
        value.name = name


def spec_of(graph: Graph, value: str) -> TensorSpec:
    """Return what a value is."""
    return graph.input[value].spec if value in graph.input else graph.op[value].outputs[0]


def _free(spec: TensorSpec) -> dict[int, object]:
    """Leave sizes that grow with the batch to torch.export; all others are fixed."""
    return {i: Dim.AUTO for i, dim in enumerate(spec.shape) if isinstance(dim, str)}


def _messages(error: BaseException | None) -> list[str]:
    """Return the texts of an error and of its causes, the outermost first."""
    found = []
    while error is not None:
        found.append(str(error))
        error = error.__cause__ or error.__context__
    return found


def _write_stages(plan: Plan, found: list[StageFile], path: Path) -> None:
    """Write the order of the files, and what flows between them."""
    stages = [
        {
            "file": entry.file,
            "device": entry.device,
            "inputs": [*stage.receives, *stage.inputs],
            "outputs": list(roots(plan.graph, stage)),
        }
        for entry, stage in zip(found, plan.stages.stages, strict=True)
    ]
    outputs = {name: value for name, value in plan.graph.output_names}
    path.write_text(
        json.dumps({"stages": stages, "outputs": outputs}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
    os._exit(0)  # what the bundle started does not keep this process
