"""A user's weights into a bundle and out again: split --weights, load, run --save, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.frontend import load_model_file
from tests.support.bundles import copied
from tests.support.command_line import call, files, write_cluster, write_model
from tests.support.hf_models import LLAMA, in_shards, read, same, write_checkpoint, write_config

ROOT = Path(__file__).resolve().parents[2]

# With batch norm, a tie, a buffer outside the state dict, and state that forward never reads.
NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.middle.weight
        self.spare = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((8,), 3.0), persistent=False)

    def forward(self, x):
        x = self.norm(self.first(x)) * self.scale
        return self.last(torch.tanh(self.middle(x)))


def model():
    return Net()


def example_batch():
    return {"x": torch.linspace(-1, 1, 64).view(8, 8), "y": torch.zeros(8, 8)}


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named):
    return torch.optim.AdamW(named, lr=0.1)
"""


def state_of(path: Path | str, seed: int) -> dict[str, Tensor]:
    state = load_model_file(path, seed=seed).model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def saved(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture
def net(tmp_path: Path) -> tuple[Path, Path]:
    """A model file and a cluster of two devices."""
    return write_model(tmp_path, NET), write_cluster(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model file, its bundle, and what a run of one step saved."""
    folder = tmp_path_factory.mktemp("made")
    bundle = split((write_model(folder, NET), write_cluster(folder)))
    assert call("run", bundle, "--steps", "1", "--save", folder / "saved").code == 0
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy of that bundle."""
    return copied(made / "bundle", tmp_path)


def split(net: tuple[Path, Path], *more: str | Path) -> Path:
    model, cluster = net
    out = model.parent / "bundle"
    words = ("--devices", cluster, "--out", out, "--partitioner", "naive", "--micro-batches", "1")
    done = call("split", model, *words, *more)
    assert done.code == 0, done.err
    return out


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--weights-by-reference",)])
def test_trained_weights_load_into_the_users_model(
    net: tuple[Path, Path], tmp_path: Path, more: tuple[str, ...]
) -> None:
    given = state_of(net[0], seed=7)
    bundle = split(net, "--weights", saved(tmp_path / "given.safetensors", given), *more)
    assert call("export", bundle, "--to", tmp_path / "start.safetensors").code == 0
    assert same(read(tmp_path / "start.safetensors"), given)

    done = call("run", bundle, "--steps", "3", "--save", tmp_path / "saved")
    assert done.code == 0, done.err
    done = call(
        "export", bundle, "--weights", tmp_path / "saved", "--to", tmp_path / "m.safetensors"
    )
    assert done.code == 0, done.err
    model = load_model_file(net[0]).model
    model.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    assert same(model.state_dict(), trained_here(net[0], given, steps=3))
    assert call("verify", bundle, "--steps", "2").code == 0  # it asks the checkpoint, too


def trained_here(path: Path, given: Mapping[str, Tensor], steps: int) -> Mapping[str, Tensor]:
    """Train the unsplit model in this process."""
    file: Any = load_model_file(path)
    model, batch = file.model.train(), file.example_batch
    model.load_state_dict(given)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = file.optimizer(list(model.named_parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        file.loss(model(batch["x"]), batch).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    state: Mapping[str, Tensor] = model.state_dict()
    return state


def test_a_checkpoint_replaces_a_bundles_weights(made: Path, bundle: Path, tmp_path: Path) -> None:
    given = state_of(made / "model.py", seed=8)
    done = call("load", bundle, "--from", saved(tmp_path / "given.safetensors", given), "--json")
    assert done.code == 0, done.err
    assert done.objects == [{"wrote": str(bundle / "weights")}]
    bb.export_weights(bundle, tmp_path / "out.safetensors")
    assert same(read(tmp_path / "out.safetensors"), given)
    assert call("verify", bundle, "--steps", "1").code == 0  # it reads the checkpoint, too


def test_saved_weights_go_on_in_a_bundle(made: Path, bundle: Path, tmp_path: Path) -> None:
    bb.load_weights(bundle, made / "saved")
    bb.export_weights(bundle, tmp_path / "out.safetensors")
    found, first = read(tmp_path / "out.safetensors"), state_of(made / "model.py", seed=0)
    joined = {k: v for path in (made / "saved").iterdir() for k, v in read(path).items()}
    assert all(torch.equal(joined[name], found[name]) for name in found if name in joined)
    assert not torch.equal(found["first.weight"], first["first.weight"])
    assert torch.equal(found["spare.weight"], first["spare.weight"])  # no device has it


def test_a_checkpoint_that_does_not_fit_changes_nothing(
    made: Path, bundle: Path, tmp_path: Path
) -> None:
    before = files(bundle)
    given = state_of(made / "model.py", seed=8)
    del given["norm.weight"]
    path = saved(tmp_path / "given.safetensors", given)
    done = call("load", bundle, "--from", path)
    assert done.code == 2
    assert "missing in the checkpoint: norm.weight" in done.err
    assert files(bundle) == before


def test_export_refuses_what_it_cannot_do(bundle: Path, tmp_path: Path) -> None:
    done = call("export", bundle, "--to", tmp_path / "model.bin")
    assert "ends in .safetensors" in done.err
    (tmp_path / "saved").mkdir()
    saved(tmp_path / "saved" / "d0.safetensors", read(bundle / "weights" / "d0.safetensors"))
    done = call(
        "export", bundle, "--to", tmp_path / "m.safetensors", "--weights", tmp_path / "saved"
    )
    assert done.code == 2
    assert "gather the files of all devices" in done.err
    (tmp_path / "m.safetensors").write_text("mine")
    done = call("export", bundle, "--to", tmp_path / "m.safetensors")
    assert done.code == 2
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_a_reference_whose_checkpoint_is_gone_is_named(
    made: Path, bundle: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path / "given.safetensors", state_of(made / "model.py", seed=7))
    bb.load_weights(bundle, path, by_reference=True)
    listed = json.loads((bundle / "weights" / "d0.references.json").read_text())
    assert listed["first.weight"] == {"file": str(path), "key": "first.weight"}
    path.unlink()
    done = call("run", bundle, "--steps", "1")
    assert done.code != 0
    assert "put the checkpoint back" in done.err


def test_a_module_in_memory_takes_no_checkpoint(tmp_path: Path) -> None:
    cluster = bb.read_cluster(write_cluster(tmp_path))
    with pytest.raises(bb.InputError, match="has its weights already"):
        bb.split(nn.Linear(2, 2), cluster, tmp_path / "b", weights=tmp_path)


def test_a_models_own_weights_come_back_out_in_shards(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "x" / "m.safetensors"
    done = call("export", made / "bundle", "--to", out, "--shard-bytes", "300")
    assert done.code == 0, done.err
    shards = sorted(out.parent.glob("*.safetensors"))
    assert len(shards) > 2
    found = {name: tensor for path in shards for name, tensor in read(path).items()}
    assert same(found, state_of(made / "model.py", seed=0))


@pytest.mark.parametrize(
    "words",
    [("--to", "m.safetensors"), ("--to", "m.safetensors", "--shard-bytes", "300"), ("--dcp", "d")],
)
def test_an_export_replaces_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """No form of `export` has --force: what is there stays as it is."""
    monkeypatch.chdir(tmp_path)
    assert call("export", made / "bundle", *words).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before
    assert call("export", made / "bundle", *words).code == 2
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.nightly
def test_a_sharded_hugging_face_checkpoint_becomes_a_bundle(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {**LLAMA, "tie_word_embeddings": True, "dtype": "float32"}
    expected = write_checkpoint(tmp_path / "hf", fields)
    stored = {n: t.bfloat16() for n, t in read(tmp_path / "hf" / "model.safetensors").items()}
    assert "lm_head.weight" not in stored
    (tmp_path / "hf" / "model.safetensors").unlink()
    in_shards(tmp_path / "hf", stored)
    done = call(
        *("split", f"hf:{tmp_path / 'hf'}", "--weights", tmp_path / "hf", "--out", tmp_path / "b"),
        *("--devices", write_cluster(tmp_path), "--partitioner", "naive", "--micro-batches", "2"),
        *("--batch", "4", "--seq", "8"),
    )
    assert done.code == 0, done.err
    assert "are bfloat16 in the checkpoint and are cast to the model's float32" in done.err
    bb.export_weights(tmp_path / "b", tmp_path / "out.safetensors")
    found = read(tmp_path / "out.safetensors")
    assert same(found, {name: t.bfloat16().float() for name, t in expected.items()})
    assert F.mse_loss(found["lm_head.weight"], found["model.embed_tokens.weight"]) == 0
    assert call("verify", tmp_path / "b", "--steps", "1").code == 0


BIG = {
    **LLAMA,
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "vocab_size": 2048, "dtype": "float32"},
}
PROBE = """
import json, resource, sys
sys.path.insert(0, ".")
import torch, train
from runtime.train import LocalTransport, Hub, make_device
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
make_device(train.BUNDLE, 1, LocalTransport(Hub()), 0, torch.device("cpu"))
print(before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
SPLIT = """
import resource, sys
from bigbrain_fx.cli import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)
"""


def peaks_of_split(folder: Path, out: Path, *more: str) -> tuple[int, int]:
    """Split a Hugging Face model in new processes; return parent's and child's peak bytes."""
    words = ["split", f"hf:{folder}?batch=2&seq=8", "--devices", str(write_cluster(out.parent, 4))]
    words += ["--out", str(out), "--partitioner", "naive", "--micro-batches", "2", *more]
    _, err = python(SPLIT, out.parent, *words)
    parent, child = err.split()[-2:]
    return int(parent), int(child)


def python(program: str, folder: Path, *words: str) -> tuple[str, str]:
    """Run a program; return what it printed. The shell between keeps our own peak out of its."""
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A checkpoint, its bytes, and the peak bytes of a child that splits next to nothing."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("big")
    tensors = write_checkpoint(folder / "hf", BIG)
    whole = sum(t.numel() * t.element_size() for t in tensors.values())
    _, idle = peaks_of_split(write_config(folder / "tiny", LLAMA), folder / "t")
    return folder / "hf", whole, idle


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--weights-by-reference",)])
def test_no_process_holds_the_whole_model(
    big: tuple[Path, int, int], tmp_path: Path, more: tuple[str, ...]
) -> None:
    hf, whole, idle = big
    assert whole > 400_000_000
    parent, child = peaks_of_split(hf, tmp_path / "b", "--weights", str(hf), *more)
    assert parent < 0.5 * whole  # Python, planner and one piece of a tensor
    assert child < idle + 0.25 * whole  # torch and transformers, and a longer graph

    before, after = (int(word) for word in python(PROBE, tmp_path / "b")[0].split())
    print(f"model {whole}, split {parent} and {child} ({idle} idle), device {before} -> {after}")
    assert after - before < 0.5 * whole  # a quarter of the model, and one tensor being read
