"""A bundle for inference gives what `model.eval()` gives, bit for bit, without bigbrain-fx."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bigbrain_fx as bb
from bigbrain_fx.bundles.launch import RunOptions, free_port, run
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import Captured, ModelFile, capture, load_model_file
from bigbrain_fx.frontend.tracing.step import input_names, route, without_fast_path
from bigbrain_fx.frontend.translation.batch import fill, named_tensors, take_apart
from bigbrain_fx.frontend.translation.params import tensor_names
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.promise.conftest import NUMPY, Outside
from tests.support import samples
from tests.support.bundles import MODEL, cluster, copied, edit

MICRO = 4
CELLS = [
    (name, partitioner, devices)
    for name in ("gpt", "resnet", "unet", "llama", "moe", "encdec")
    for partitioner, devices in (("naive", 2), ("chain-dp", 3), ("naive", 3), ("scattered", 2))
]
CALL = """
from safetensors.torch import load_file, save_file

from bundle.infer import infer

rows = load_file("in.safetensors")
save_file(infer(rows), "out.safetensors")
again = infer({name: tensor[:3] if name in SPLIT else tensor for name, tensor in rows.items()})
save_file(again, "short.safetensors")
"""


@dataclass(frozen=True)
class InMemory:
    """The weights of a model captured here."""

    captured: Captured

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        for file, names in files.items():
            found = {n: self.captured.tensors[n].detach().clone() for n in names}
            save_file(found, folder / file)

    def write_batch(self, path: Path) -> None:
        save_file({n: t.clone() for n, t in self.captured.inputs().items()}, path)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=2)
def loaded(name: str) -> tuple[ModelFile, Captured]:
    file = load_model_file(samples.ROOT / "models" / f"{name}.py")
    return file, capture(file.model, file.example_batch, file.loss, training=False)


def eager(
    file: ModelFile, micro_batches: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Run the user's own module after eval() on each micro-batch, as any program would."""
    how = route(file.model, file.example_batch, file.loss is not None)
    names = input_names(file.model, file.example_batch, how)
    template = take_apart(file.example_batch, names, tensor_names(file.model)).template
    file.model.eval()
    with torch.no_grad(), without_fast_path():
        found = [
            dict(named_tensors(how.call(file.model, fill(template, m)))) for m in micro_batches
        ]
    file.model.train()
    return found


def parts_of(
    rows: Mapping[str, Tensor], split: Sequence[str], size: int
) -> list[dict[str, Tensor]]:
    """Split rows into micro-batches; the last batch is filled up with its last row."""
    count = len(rows[split[0]])
    room = MICRO * size
    filled = dict(rows)
    for name in split:
        last = rows[name][-1:]
        filled[name] = torch.cat([rows[name], *[last] * (-count % room)])
    total = len(filled[split[0]])
    return [
        {n: t[i : i + size].clone() if n in split else t for n, t in filled.items()}
        for i in range(0, total, size)
    ]


def expected(
    file: ModelFile, plan: Plan, rows: Mapping[str, Tensor], split: Sequence[str]
) -> dict[str, Tensor]:
    count = len(rows[split[0]])
    outputs = eager(file, parts_of(rows, split, plan.rows))
    joined = {}
    for name, _ in plan.graph.output_names:  # all but a loss that the model returns itself
        parts = [part[name] for part in outputs]
        if parts[0].dim() == 0:  # one value a micro-batch, of those with any row of ours
            joined[name] = torch.stack(parts)[: -(-count // plan.rows)]
        else:
            each = parts[0].shape[0] // plan.rows
            joined[name] = torch.cat(parts)[: count * each]
    return joined


def assert_bitwise(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert set(found) == set(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), f"{name} differs"


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "partitioner", "devices"), CELLS)
def test_models_from_python(
    name: str, partitioner: str, devices: int, outside: Outside, tmp_path: Path
) -> None:
    """`from bundle.infer import infer` in a process that cannot import bigbrain-fx."""
    file, found = loaded(name)
    options = Options(partitioner, micro_batches=MICRO, mode="eval")
    source = Source(str(file.path), has_batches=file.batches is not None)
    plan = make_plan(found.graph, samples.cluster(devices), source, options)
    write_bundle(plan, InMemory(found), tmp_path / "bundle")
    inputs = found.inputs(plan.rows * MICRO + 3)
    split = [e.name for e in found.graph.inputs if e.batched]
    save_file({n: t.contiguous() for n, t in inputs.items()}, tmp_path / "in.safetensors")
    (tmp_path / "call.py").write_text(CALL.replace("SPLIT", repr(split)))
    outside.results(outside.start(tmp_path, ["call.py"], NUMPY))  # to save_file, of its own
    assert_bitwise(load_file(tmp_path / "out.safetensors"), expected(file, plan, inputs, split))
    few = {n: t[:3] if n in split else t for n, t in inputs.items()}
    assert_bitwise(load_file(tmp_path / "short.safetensors"), expected(file, plan, few, split))


# --------------------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def letters_eval(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """letters.py, split for inference over two devices; the model has no use for a loss."""
    folder = tmp_path_factory.mktemp("letters-eval")
    (folder / "letters.py").write_text(MODEL.replace("def loss(", "def not_a_loss("))
    text = (folder / "letters.py").read_text()
    short = 'yield {"letters": rows[:, :-1].contiguous()}'
    old = 'yield {"letters": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}'
    (folder / "letters.py").write_text(text.replace(old, short))
    options = Options("naive", micro_batches=MICRO, mode="eval")
    made = bb.split(folder / "letters.py", cluster(), folder / "bundle", options)
    return made.bundle, made.plan


def rows_of(bundle: Path, count: int) -> dict[str, Tensor]:
    rows = torch.randint(27, (count, 5), generator=torch.Generator().manual_seed(1))
    save_file({"letters": rows}, bundle.parent / "rows.safetensors")
    return {"letters": rows}


def read_outputs(folder: Path) -> dict[str, Tensor]:
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.nightly
def test_a_model_without_a_loss_in_real_processes(
    letters_eval: tuple[Path, Plan], outside: Outside, tmp_path: Path
) -> None:
    """21 rows are three batches of 8, the last with 5: two and a half micro-batches."""
    bundle, plan = letters_eval
    rows = rows_of(bundle, 21)
    port, processes = str(free_port()), list[subprocess.Popen[str]]()
    inputs = ["--inputs", str(bundle.parent / "rows.safetensors"), "--outputs", str(tmp_path / "o")]
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        words = ["infer.py", "--json", "--deadline", "60", *inputs]
        processes.append(outside.start(bundle, words, place))
    first, second = outside.results(*processes)
    lines = [json.loads(line) for line in second.splitlines()]
    assert first == ""
    assert [(line["batch"], line["rows"]) for line in lines] == [(0, 8), (1, 8), (2, 5)]
    file = load_model_file(bundle.parent / "letters.py")
    assert_bitwise(read_outputs(tmp_path / "o"), expected(file, plan, rows, ["letters"]))


@pytest.mark.nightly
def test_run_gives_the_same_as_one_process(
    letters_eval: tuple[Path, Plan], outside: Outside, tmp_path: Path
) -> None:
    bundle, _ = letters_eval
    done = run(bundle, RunOptions(3, deadline_s=60.0, outputs=tmp_path / "processes"))
    assert [(line.batch, line.rows) for line in done.batches] == [(0, 8), (1, 8), (2, 8)]
    assert done.steps == ()
    words = ("--in-process", "--steps", "3", "--outputs", str(tmp_path / "one"))
    said = outside.python(bundle, "infer.py", *words)
    assert "24 rows in " in said.splitlines()[-1]
    assert_bitwise(read_outputs(tmp_path / "processes"), read_outputs(tmp_path / "one"))


def test_rows_that_do_not_fit_the_model_are_refused(
    letters_eval: tuple[Path, Plan], tmp_path: Path
) -> None:
    bundle, _ = letters_eval
    save_file({"letters": torch.zeros(4, 5)}, tmp_path / "floats.safetensors")
    with pytest.raises(bb.InputError, match="'letters' is float32"):
        run(bundle, RunOptions(deadline_s=60.0, inputs=tmp_path / "floats.safetensors"))
    with pytest.raises(bb.InputError, match="there is no file"):
        run(bundle, RunOptions(inputs=tmp_path / "none.safetensors"))
    with pytest.raises(bb.InputError, match="--save cannot be given: this bundle is for inference"):
        run(bundle, RunOptions(save=tmp_path / "weights"))


def test_nothing_of_training_is_in_the_bundle(letters_eval: tuple[Path, Plan]) -> None:
    bundle, plan = letters_eval
    names = {path.name for path in bundle.iterdir()}
    assert not {"train.py", "training.py", "example.safetensors"} & names
    assert {path.name for path in (bundle / "weights").iterdir()} == {
        "index.json",
        *(f"{device}.safetensors" for device in plan.stages.devices),
    }


@pytest.mark.nightly
def test_verify_sees_a_changed_bundle(letters_eval: tuple[Path, Plan], tmp_path: Path) -> None:
    broken = copied(letters_eval[0], tmp_path)
    edit(broken / "device_d1.py", "F.gelu", "F.relu")
    failed = {check.name for check in bb.verify(broken, steps=1).checks if not check.passed}
    both = {"captured graph = bundle, outputs", "a short batch = its rows, filled up"}
    assert failed == both


@pytest.mark.nightly
def test_verify_holds(letters_eval: tuple[Path, Plan]) -> None:
    bundle, _ = letters_eval
    found = bb.verify(bundle, steps=2)
    assert found.passed, str(found)
    assert [check.name for check in found.checks][1:] == [
        "your module after eval() = captured graph",
        "captured graph = bundle, outputs",
        "rows of your module stand alone",
        "a short batch = its rows, filled up",
        "weights and buffers stay as they are",
    ]


@pytest.mark.nightly
def test_trained_weights_under_one_plan(tmp_path: Path) -> None:
    """Train, save, split again for inference where the weights are, and infer with them."""
    (tmp_path / "letters.py").write_text(MODEL)
    options = Options("naive", micro_batches=MICRO)
    made = bb.split(tmp_path / "letters.py", cluster(), tmp_path / "train", options)
    run(made.bundle, RunOptions(2, deadline_s=60.0, save=tmp_path / "saved"))
    options = Options(mode="eval")
    saved, like = tmp_path / "saved", made.bundle
    again = bb.split(
        tmp_path / "letters.py", None, tmp_path / "eval", options, like=like, weights=saved
    )
    for device in again.plan.stages.devices:
        here = load_file(tmp_path / "eval" / "weights" / f"{device}.safetensors")
        there = load_file(saved / f"{device}.safetensors")
        assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    found = bb.verify(again.bundle, steps=2, processes=True)
    assert found.passed, str(found)
