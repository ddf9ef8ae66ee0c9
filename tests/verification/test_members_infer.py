"""Inference by tensor groups: a bundle's outputs are those of members in lockstep, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification.child import inference_chain
from bigbrain_fx.verification.members import same_outputs
from tests.support.training import HEADS, equal, planned
from tools.conformance.matrix import Bench, imported

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(HEADS)
    file = load_model_file(path)
    return Bench(file, capture(file.model, file.example_batch, file.loss, training=False))


def inferring(bench: Bench, devices: int, shares: tuple[int, ...] = ()) -> Plan:
    given: Any = {"tensor": 2, "micro_batches": 2, "tensor_shares": shares, "mode": "eval"}
    return planned(bench, equal(devices), **given)


@pytest.mark.gate("4-shares1")
@pytest.mark.parametrize(("devices", "shares"), [(2, (3, 1)), (4, ())])
def test_a_bundle_infers_as_its_members_in_lockstep(
    bench: Bench, tmp_path: Path, devices: int, shares: tuple[int, ...]
) -> None:
    plan = inferring(bench, devices, shares)
    assert plan.schedule == "forward"
    folder = write_bundle(plan, bench, tmp_path / "bundle")
    with imported(folder, force_adamw=False):
        checks = inference_chain(bench.file, bench.captured, plan, folder, 2)
    assert [c["passed"] for c in checks] == [True] * 7, checks
    assert "TP ranks' graphs = bundle, outputs" in [c["name"] for c in checks]


def test_only_one_member_collects_and_nothing_is_said_of_gradients(
    bench: Bench, tmp_path: Path
) -> None:
    folder = write_bundle(inferring(bench, 4), bench, tmp_path / "bundle")
    texts = {f"d{i}": (folder / f"device_d{i}.py").read_text() for i in range(4)}
    assert [name for name, text in texts.items() if "    outputs = " in text] == ["d3"]
    assert not [name for name, text in texts.items() if "copy_to_group" in text]
    assert (folder / "runtime" / "group.py").is_file()
    assert not (folder / "runtime" / "pipeline_device.py").exists()


def test_a_wrong_sum_is_no_rounding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigbrain_fx.frontend.tracing.executor import tensor_parallel

    plan = inferring(bench, 2)
    assert same_outputs(bench.captured, plan)["passed"] is True
    monkeypatch.setattr(tensor_parallel, "added", lambda parts: parts[0] + 0.999 * parts[1])
    assert same_outputs(bench.captured, plan)["passed"] is False
