"""A bundle is written whole or not at all, inside its folder, and takes along what it needs."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bigbrain_fx.core import Graph
from bigbrain_fx.emit import check_out, write_bundle
from bigbrain_fx.emit.files import model_file
from bigbrain_fx.emit.files.texts import bundle_texts, weight_files, weight_index
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support import samples
from tests.support.synthetic import chain_graph

GRAPH: Graph = chain_graph(1, 6, tied=True)


class NoWeights:
    """Writes files without a tensor where weights would be."""

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        for name in files:
            (folder / name).write_bytes((2).to_bytes(8, "little") + b"{}")

    def write_batch(self, path: Path) -> None:
        path.write_bytes(b"b")


class Broken(NoWeights):
    """Fails when most is written."""

    def write_batch(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def plan_of(source: Source, devices: int = 2) -> Plan:
    options = Options("naive", micro_batches=2)
    return make_plan(GRAPH, samples.cluster(devices), source, options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_a_bundle(tmp_path: Path) -> None:
    out = write_bundle(plan_of(Source("")), NoWeights(), tmp_path / "some" / "bundle")
    expected = {"README.md", "__init__.py", "device_d0.py", "device_d1.py", "example.safetensors"}
    assert expected | {"plan.json", "runtime", "train.py", "training.py", "weights"} <= set(
        names(out)
    )
    assert names(out / "weights") == ["d0.safetensors", "d1.safetensors", "index.json"]
    assert {"checked_device.py", "train.py"} <= set(names(out / "runtime"))
    assert not {"infer.py", "pipelining.py", "rows.py", "deferred.py", "__pycache__"} & set(
        names(out / "runtime")
    )
    assert names(tmp_path / "some") == ["bundle"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*bundle: No space left on device"):
        write_bundle(plan_of(Source("")), Broken(), tmp_path / "bundle")
    assert names(tmp_path) == []


def test_a_failure_leaves_the_old_bundle(tmp_path: Path) -> None:
    out = write_bundle(plan_of(Source("")), NoWeights(), tmp_path / "bundle")
    before = (out / "plan.json").read_bytes()
    with pytest.raises(InputError, match=r"cannot write .*bundle: No space left on device"):
        write_bundle(plan_of(Source(""), 1), Broken(), out, force=True)
    assert (out / "plan.json").read_bytes() == before
    assert names(tmp_path) == ["bundle"]


def test_force_replaces_a_bundle_and_nothing_else(tmp_path: Path) -> None:
    out = write_bundle(plan_of(Source("")), NoWeights(), tmp_path / "bundle")
    with pytest.raises(InputError, match="exists already"):
        write_bundle(plan_of(Source("")), NoWeights(), out)
    write_bundle(plan_of(Source(""), 1), NoWeights(), out, force=True)
    assert "device_d1.py" not in names(out)
    (tmp_path / "thesis").mkdir()
    with pytest.raises(InputError, match="not a bundle"):
        check_out(tmp_path / "thesis", force=True)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(InputError, match="symbolic link"):
        check_out(tmp_path / "link", force=True)


@pytest.mark.nightly
def test_every_tensor_has_a_file_and_every_parameter_an_owner() -> None:
    plan = samples.plan("gpt", "naive", 3)
    files = weight_files(plan)
    assert list(files) == ["d0.safetensors", "d1.safetensors", "d2.safetensors"]
    listed = {name for tensors in files.values() for name in tensors}
    assert listed == {param.name for param in plan.graph.params}
    index = weight_index(plan)
    trained = [p.name for p in plan.graph.params if p.spec.requires_grad and p.name == p.canonical]
    assert list(index) == trained
    assert index["embed.weight"] == "d0"


# --------------------------------------------------------------------------- the user's own code

MODEL = """\
import helper
from torch.optim import SGD

INPUTS = ["x"]
WHOLE = 3
SPECS = 4
OPTIMIZER = SGD
LR_SCALE = 0.5
CLIP_NORM = 2


def batches(seed):
    return helper.count(WHOLE + SPECS), INPUTS


def optimizer(named_params):
    return OPTIMIZER(named_params, lr=LR_SCALE / CLIP_NORM)


def lr_scale(step):
    return LR_SCALE
"""


def training_of(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an emitted training.py."""
    (folder / "training.py").write_text(text)
    spec = importlib.util.spec_from_file_location("emitted_training", folder / "training.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(folder))
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return module


def users(folder: Path, text: str = MODEL, helper: str = "helper") -> Source:
    folder.mkdir(exist_ok=True)
    (folder / f"{helper}.py").write_text("from itertools import count\n")
    (folder / "model.py").write_text(text)
    path = str(folder / "model.py")
    return Source(path, has_batches=True, has_optimizer=True, has_lr_scale=True)


def test_the_users_names_keep_their_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model file may call things as the bundle does: WHOLE, OPTIMIZER, LR_SCALE."""
    plan = plan_of(users(tmp_path / "user"))
    out = write_bundle(plan, NoWeights(), tmp_path / "bundle")
    assert (out / "helper.py").is_file()
    assert not (out / "example.safetensors").exists()
    module = training_of((out / "training.py").read_text(), out, monkeypatch)
    counter, inputs = module.batches(0)
    assert next(counter) == 7
    assert inputs == ["x"]
    assert module.lr_scale(0) == 0.5
    weight = __import__("torch").zeros(1, requires_grad=True)
    assert module.optimizer([("w", weight)]).param_groups[0]["lr"] == 0.25
    assert_train_reads_what_training_has(out, module)


def assert_train_reads_what_training_has(out: Path, module: ModuleType) -> None:
    import ast

    tree = ast.parse((out / "train.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "training"
    }
    assert len(read) >= 5
    assert all(hasattr(module, name) for name in read)


@pytest.mark.parametrize("helper", ["train", "training", "device_d0", "runtime", "weights"])
def test_a_module_of_the_users_takes_no_place_of_ours(tmp_path: Path, helper: str) -> None:
    source = users(tmp_path / "user", MODEL.replace("helper", helper), helper)
    with pytest.raises(InputError, match="of its own") as caught:
        write_bundle(plan_of(source), NoWeights(), tmp_path / "bundle")
    assert "rename it" in str(caught.value)
    assert names(tmp_path) == ["user"]


def test_a_package_of_the_users_is_shipped(tmp_path: Path) -> None:
    source = users(tmp_path / "user", MODEL.replace("helper", "data.helper"))
    package = tmp_path / "user" / "data"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("from itertools import count\n")
    out = write_bundle(plan_of(source), NoWeights(), tmp_path / "bundle")
    assert names(out / "data") == ["__init__.py", "helper.py"]
    assert "`data`: copied" in (out / "README.md").read_text()


def test_functions_that_stages_call_are_shipped_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of autograd, say, that a module beside the model file defines."""
    source = users(tmp_path / "user")
    (tmp_path / "user" / "nets").mkdir()
    (tmp_path / "user" / "nets" / "deep.py").write_text("from helper import count\n")
    found = [("nets.deep", "Straight"), ("somebody.elses", "Layer")]
    monkeypatch.setattr(model_file, "user_names", lambda *_: found)
    out = write_bundle(plan_of(source), NoWeights(), tmp_path / "bundle")
    assert (out / "nets" / "deep.py").is_file()
    assert not (out / "functions.py").exists()
    assert "`nets`: copied" in (out / "README.md").read_text()


def test_texts_are_made_without_touching_a_disk() -> None:
    plan = plan_of(Source(""))
    assert bundle_texts(plan) == bundle_texts(replace(plan))
    counts = itertools.groupby(sorted(name.partition("_")[0] for name in bundle_texts(plan)))
    assert {name: len(list(same)) for name, same in counts}["device"] == 2


@pytest.mark.parametrize("name", ["../../outside", "/etc/d0", "a/b", "..", ".", "", "a\0b"])
def test_device_names_do_not_lead_out_of_the_bundle(tmp_path: Path, name: str) -> None:
    cluster = samples.cluster(2)
    renamed = (replace(cluster.devices[0], name=name), cluster.devices[1])
    options = Options("naive", micro_batches=2)
    plan = make_plan(GRAPH, replace(cluster, devices=renamed), Source(""), options)
    with pytest.raises(InputError, match="cannot be the name of a file"):
        write_bundle(plan, NoWeights(), tmp_path / "bundle")
    assert names(tmp_path) == []
