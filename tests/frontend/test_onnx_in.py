"""The ONNX importer: against ONNX's own cases, onnxruntime, and files that it must refuse."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from bigbrain_fx import Options, split, verify
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.onnx import example_inputs, load_onnx
from bigbrain_fx.frontend.onnx.module import SHAPE_INPUTS
from bigbrain_fx.frontend.onnx.nodes import OPERATORS
from bigbrain_fx.frontend.onnx.values import host

# Equal up to what no two implementations share: random draws, the order of equal entries, and the
# type of a shape that leaves the graph as a result.
FREE = (
    "test_training_dropout",
    "test_top_k_same_values",
    "test_constantofshape_int_shape_zero",
    "test_range_float16_type_positive_delta",
    "test_range_int32_type_negative_delta",
)


@cache
def conformance() -> tuple[int, tuple[str, ...]]:
    """Run every case of ONNX whose operators we know; return how many passed, and the wrong ones.

    A case may also be refused: what must not happen is another number.
    """
    passed, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for case in _cases():
            outcome = _outcome(case, Path(folder) / "case.onnx")
            passed += outcome is True
            if outcome is False and not case.name.startswith(FREE):
                wrong.append(case.name)
    return passed, tuple(wrong)


def _cases() -> Iterator[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    for case in found:
        assert case.model is not None
        known = {node.op_type for node in case.model.graph.node} <= {*OPERATORS, "Constant", "If"}
        if known and not case.model.functions:
            yield case


def _outcome(case: Any, path: Path) -> bool | None:
    """Return whether a case gives the right numbers; None when it is refused or cannot be fed."""
    onnx.save(case.model, path)
    for inputs, wanted in case.data_sets:
        try:
            values = [torch.from_numpy(np.array(value)) for value in inputs]
            module = load_onnx(path)
            with torch.no_grad():
                found = module.run(_as_shapes(case, values, inputs))
        except (BigBrainError, TypeError, ValueError):
            return None
        pairs = zip(found.values(), wanted, strict=False)
        if not all(_close(have, np.asarray(want)) for have, want in pairs):
            return False
    return True


def _as_shapes(case: Any, values: list[Any], inputs: list[Any]) -> list[Any]:
    node = case.model.graph.node[-1]
    names = [entry.name for entry in case.model.graph.input]
    places = SHAPE_INPUTS.get(node.op_type, (1,) if node.op_type.startswith("Reduce") else ())
    for place in places:
        name = node.input[place] if place < len(node.input) else ""
        if name in names:
            values[names.index(name)] = host(np.asarray(inputs[names.index(name)]))
    return values


def _close(have: Tensor, want: np.ndarray[Any, Any]) -> bool:
    found = have.numpy()
    loose = want.dtype == np.float16
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    return np.allclose(found, want, 1e-3, 2e-2 if loose else 1e-5, equal_nan=True)


@pytest.mark.nightly
def test_no_case_of_onnx_gives_another_number() -> None:
    passed, wrong = conformance()
    assert wrong == ()
    assert passed > 950


# --------------------------------------------------------------------------- whole models


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)
        for parameter in self.parameters():  # the layers start as copies, which exporters merge
            nn.init.normal_(parameter, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.encoder(self.embed(ids)))[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Conv2d(11, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        up = nn.functional.interpolate(self.up(self.down(image)), scale_factor=2.0)
        pooled = nn.functional.max_pool2d(up, 2)
        return self.head(torch.cat([image, pooled], 1)).mean((2, 3))


EXAMPLES: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "blocks": (Blocks, lambda: {"ids": torch.randint(0, 50, (2, 7))}),
    "convolutions": (Convolutions, lambda: {"image": torch.randn(2, 3, 16, 16)}),
}


@pytest.fixture(
    scope="module",
    params=[(name, dynamo) for name in EXAMPLES for dynamo in (True, False)],
    ids=lambda p: f"{p[0]}-{'dynamo' if p[1] else 'script'}",
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .onnx file of either of torch's exporters, with a free batch size."""
    name, dynamo = request.param
    make, batch = EXAMPLES[name]
    path = tmp_path_factory.mktemp("onnx") / f"{name}.onnx"
    torch.manual_seed(0)
    export(make().eval(), batch(), path, dynamo)
    return path


def export(model: nn.Module, batch: dict[str, Tensor], path: Path, dynamo: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            free = {name: {0: torch.export.Dim.DYNAMIC} for name in batch}
            torch.onnx.export(
                model, (), path, kwargs=batch, dynamo=True, dynamic_shapes=free, verbose=False
            )
        else:
            named = {name: {0: "rows"} for name in batch}
            torch.onnx.export(
                model,
                (batch,),
                path,
                dynamo=False,
                input_names=list(batch),
                dynamic_axes=named,
                opset_version=17,
            )


@pytest.mark.gate("blocks-script", "convolutions-dynamo", "convolutions-script")
def test_a_file_gives_the_numbers_of_onnxruntime(exported: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    module = load_onnx(exported).eval()
    inputs = example_inputs(module, rows=5)
    with torch.no_grad():
        found = list(module(**inputs).values())
    session = runtime.InferenceSession(exported)
    names = [spec.name for spec in module.file.inputs]
    fed = dict(zip(names, (value.numpy() for value in inputs.values()), strict=True))
    for have, want in zip(found, session.run(None, fed), strict=True):
        torch.testing.assert_close(have, torch.from_numpy(want), atol=1e-5, rtol=1e-5)


@pytest.mark.gate("convolutions-dynamo", "convolutions-script")
def test_a_file_is_captured_with_a_free_batch_and_its_modules(exported: Path) -> None:
    module = load_onnx(exported)
    captured = capture(module, example_inputs(module), training=False)
    assert captured.graph.static_batch is None
    paths = {call.path for op in captured.graph.ops for call in op.modules}
    assert any("." in path for path in paths), "the file's scopes are modules"
    held = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    assert held >= {p.name for p in captured.graph.params if p.kind != "constant"}


def test_parameters_of_an_onnx_model_train(tmp_path: Path) -> None:
    export(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        {"input": torch.ones(2, 4)},
        tmp_path / "m.onnx",
        False,
    )
    module = load_onnx(tmp_path / "m.onnx")
    (found,) = module(input=torch.ones(2, 4)).values()
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.gate("convolutions-script")
def test_a_file_is_split_run_and_verified(exported: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    size = {"memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"}
    devices = [{"name": name, "kind": "cpu", **size} for name in ("a", "b")]
    cluster.write_text(json.dumps({"devices": devices}))
    location = f"{exported}?batch=4&seq=6"
    made = split(location, cluster, tmp_path / "bundle", Options("naive", micro_batches=2))
    assert made.plan.mode == "eval"
    assert len(made.plan.stages.devices) == 2
    verify(made.bundle).require_passed()


@pytest.mark.gate("blocks-script")
def test_layers_of_a_file_share_a_class(exported: Path, tmp_path: Path) -> None:
    if "blocks" not in exported.name:
        pytest.skip("has no repeated layer")
    names = load_onnx(exported).state_dict()
    kept = [n for n in names if "Constant" not in n]
    first = {n.replace("layers.0", "#") for n in kept if "layers.0" in n}
    assert first
    assert first == {n.replace("layers.1", "#") for n in kept if "layers.1" in n}


# --------------------------------------------------------------------------- what is refused


def one_node(path: Path, op: str, domain: str = "", **attributes: Any) -> Path:
    entries = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 4]) for n in "xy"]
    node = helper.make_node(op, ["x"], ["y"], "odd_one", domain=domain, **attributes)
    graph = helper.make_graph([node], "g", entries[:1], entries[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("custom", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def test_an_unknown_operator_is_named_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"custom\.Fancy") as caught:
        load_onnx(one_node(tmp_path / "m.onnx", "Fancy", "custom"))
    assert "odd_one" in str(caught.value)


def test_an_operator_of_onnx_that_is_not_known_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Bernoulli"):
        load_onnx(one_node(tmp_path / "m.onnx", "Bernoulli"))


def test_a_use_that_has_no_counterpart_names_the_node(tmp_path: Path) -> None:
    module = load_onnx(one_node(tmp_path / "m.onnx", "ArgMax", select_last_index=1))
    with pytest.raises(CaptureError, match="select_last_index") as caught:
        module(x=torch.ones(2, 4))
    assert "odd_one" in str(caught.value.at)


def test_files_that_are_no_onnx_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model at all")
    with pytest.raises(InputError, match="no ONNX file"):
        load_onnx(tmp_path / "m.onnx")
    with pytest.raises(InputError, match="found nothing"):
        load_onnx(tmp_path / "absent.onnx")
