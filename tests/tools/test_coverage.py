"""A part of the zoo from every family: captured, split, trained and compared bit for bit.

`make coverage` runs the whole zoo, and in more splits; the code is the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigbrain_fx.core import Placement
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.plan import Options, Source, plan_placed
from tools.conformance.coverage_case import Bench, check, cluster, examine, in_fork
from tools.conformance.zoo import FAMILIES, cases, find

pytestmark = pytest.mark.filterwarnings("default")  # libraries of models deprecate their own

VERIFIED = (
    *("unet-skips", "recommender", "lstm", "custom-function", "checkpoint", "no-grad"),
    *("autocast-whole", "in-place", "buffer", "dict-output", "keyword-only"),
    *("gpt2", "llama-tied", "bert", "bart", "vit", "resnet", "blip", "ast", "dit"),
    *("longformer", "prophetnet", "detr", "wav2vec2-ctc"),
)
REFUSED = ("python-dice", "rows-by-data")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", VERIFIED)
def test_a_model_splits_and_trains_bit_for_bit(name: str, tmp_path: Path) -> None:
    bench = Bench.of(find(name), tmp_path)
    plan = bench.plan("naive", 2)
    assert len(plan.stages.devices) == 2
    in_fork(lambda: check(bench, plan, tmp_path / "cell", processes=False), name)


@pytest.mark.nightly
def test_a_module_called_twice_draws_anew_each_time(tmp_path: Path) -> None:
    """The first call is cut in two, the second is whole: each says which call it is."""
    bench = Bench.of(find("shared-draws"), tmp_path)
    graph = bench.captured.graph
    first = next(op.name for op in graph.ops if op.target == "aten.add.Tensor")
    later = {op.name for op in graph.ops if op.module_path in ("", "head")} - {"mul"}
    where = {op.name: "d1" if op.name == first or op.name in later else "d0" for op in graph.ops}
    where |= {op.name: "d0" for op in graph.ops if op.target == "aten.mul.Tensor" and 2 in op.args}
    source = Source(str(bench.file.path), has_loss=True, module=bench.file.path.stem)
    plan = plan_placed(graph, cluster(2), source, Options(micro_batches=2), Placement(where))
    text = bundle_texts(plan)["device_d0.py"]
    assert ".nth(0)(" in text
    assert ".nth(1)(" in text
    in_fork(lambda: check(bench, plan, tmp_path / "cell", processes=False), "shared-draws")


@pytest.mark.nightly
@pytest.mark.parametrize("name", REFUSED)
def test_code_that_no_graph_holds_is_refused_with_its_line(name: str) -> None:
    found = examine(find(name), "fast")
    assert found["status"] == "refused", found
    assert "at: obstacles.py:" in str(found["detail"])
    assert "help: " in str(found["detail"])


@pytest.mark.nightly
def test_a_module_that_no_trace_can_hold_is_kept_whole_by_itself(tmp_path: Path) -> None:
    found = examine(find("item"), "fast")
    assert found["status"] == "verified", found
    assert "opaque, on one device: Reading" in str(found["detail"])


# What the refusal of a case must advise; its twin in the zoo does just that.
REMEDIES = {
    "python-dice": "draw with torch.rand and decide with torch.where",
    "rows-by-data": "use a mask and torch.where instead of selecting rows",
    "recommender-offsets": "a row of indices each",
    "opt-layerdrop": "layerdrop=0",
}


def test_every_refused_case_has_a_remedy_that_works() -> None:
    refused = {case.name: case for case in cases() if case.refused}
    assert set(refused) == set(REMEDIES)
    assert all(not find(case.remedy).refused for case in refused.values())


@pytest.mark.gate("recommender-offsets")
@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_of_a_refusal_works(name: str, tmp_path: Path) -> None:
    """The help text names it, and the twin that follows it trains bit for bit."""
    case = find(name)
    found = examine(case, "fast")
    assert found["status"] == "refused", found
    assert REMEDIES[name] in str(found["detail"]).partition("help: ")[2]
    bench = Bench.of(find(case.remedy), tmp_path)
    plan = bench.plan("naive", 2)
    in_fork(lambda: check(bench, plan, tmp_path / "cell", processes=False), name)


def test_the_zoo_names_each_case_once_and_has_every_family() -> None:
    found = list(cases())
    assert len({case.name for case in found}) == len(found)
    assert {case.family for case in found} == set(FAMILIES)
    with pytest.raises(KeyError, match="no case is called 'gpt9'"):
        find("gpt9")
