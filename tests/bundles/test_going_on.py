"""A commit goes on in plain PyTorch with the same bits, and an earlier one can be gone back to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.bundles import (
    Validation,
    export_training,
    export_weights,
    list_commits,
    rollback,
    validations,
)
from bigbrain_fx.bundles.validating import Validator
from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime.plain import load_optimizer
from tests.support import warm
from tests.support.bundles import MODEL as LETTERS, cluster
from tests.support.command_line import call
from tests.support.training import untied

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """Two layers that share a weight, and a norm with buffers' place taken by none."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.norm(torch.tanh(self.a(x))))

def model():
    return Net()

def batches(seed):
    for step in range(100):
        dice = torch.Generator().manual_seed(1000 * seed + step)
        yield {"x": torch.randn(4, 8, generator=dice), "y": torch.randn(4, 8, generator=dice)}

def example_batch():
    return next(batches(0))

def loss(output, batch):
    return (output - batch["y"]).square().mean()

def optimizer(named):
    named = list(named)
    return torch.optim.AdamW([
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0},
    ], lr=3e-3)
'''


def train(bundle: Path, steps: int, *more: str | Path) -> list[float]:
    words = [sys.executable, "train.py", "--in-process", "--json", "--steps", str(steps)]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = warm.run(
        [*words, *map(str, more)],
        cwd=bundle,
        env={**plain, "OMP_NUM_THREADS": "1"},
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    """A bundle with its commits of steps 0, 2, 4 in `commits`, and its end, step 7, in `saved`."""
    folder = tmp_path_factory.mktemp("going-on")
    (folder / "pair.py").write_text(MODEL)
    options = bb.Options("naive", micro_batches=1)
    bundle = bb.split(folder / "pair.py", cluster(), folder / "bundle", options).bundle
    train(bundle, 4, "--checkpoint-dir", "commits", "--checkpoint-every", "2", "--keep", "5")
    train(bundle, 7, "--save", "saved")
    return bundle


def namespace(bundle: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    exec(compile((bundle.parent / "pair.py").read_text(), "pair.py", "exec"), found)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as the bundle's devices do: kernels of two threads sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_plain_pytorch_goes_on_with_the_same_bits(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    done = export_training(trained, *out, trained / "commits")
    assert (done.step, done.warnings) == (4, ())
    pair = namespace(trained)
    net: nn.Module = pair["model"]()  # type: ignore[operator]
    net.load_state_dict(load_file(out[0]))
    optimizer = pair["optimizer"](net.named_parameters())  # type: ignore[operator]
    first = load_optimizer(net, optimizer, out[1])
    for step, batch in zip(range(7), pair["batches"](0), strict=False):  # type: ignore[operator]
        if step >= first:
            optimizer.zero_grad()
            pair["loss"](net(batch["x"]), batch).backward()  # type: ignore[operator]
            optimizer.step()
    export_weights(trained, tmp_path / "whole.safetensors", weights=trained / "saved")
    wanted = load_file(tmp_path / "whole.safetensors")
    assert {n for n, t in net.state_dict().items() if not torch.equal(t, wanted[n])} == set()


@pytest.mark.usefixtures("nursery")
@pytest.mark.nightly
def test_the_weights_of_a_commit_alone_also_where_steps_overlap(tmp_path: Path) -> None:
    """Of an asynchronous run the state is refused, in words that lead to the weights."""
    (tmp_path / "letters.py").write_text(untied(LETTERS))
    options = bb.Options("naive", micro_batches=2, asynchronous="2bw")
    bundle = bb.split(tmp_path / "letters.py", cluster(), tmp_path / "bundle", options).bundle
    train(bundle, 4, "--checkpoint-dir", "commits", "--checkpoint-every", "2", "--save", "saved")
    out, commits = tmp_path / "out.safetensors", bundle / "commits"
    state = tmp_path / "state.safetensors"
    refused = call("export", bundle, "--to", out, "--checkpoint-dir", commits, "--optimizer", state)
    assert refused.code == 2
    assert "leave --optimizer out" in refused.err
    done = call("export", bundle, "--to", out, "--checkpoint-dir", commits, "--json")
    assert (done.code, json.loads(done.out)["step"]) == (0, 4)
    export_weights(bundle, tmp_path / "whole.safetensors", weights=bundle / "saved")
    found, wanted = load_file(out), load_file(tmp_path / "whole.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    both = call("export", bundle, "--to", out, "--checkpoint-dir", commits, "--weights", "saved")
    assert (both.code, "expected one of --weights and --checkpoint-dir" in both.err) == (2, True)


def test_the_loader_stands_alone_and_refuses_others(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    done = export_training(trained, *out, trained / "commits")
    assert done.loader.read_text() == Path(load_optimizer.__code__.co_filename).read_text()
    net: nn.Module = namespace(trained)["model"]()  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"is of torch.optim.adamw.AdamW, the optimizer is SGD"):
        load_optimizer(net, torch.optim.SGD(net.parameters()), out[1])
    with pytest.raises(ValueError, match=r"not those of the state: a\.weight"):
        load_optimizer(net, torch.optim.AdamW([net.a.bias]), out[1])  # type: ignore[union-attr, arg-type]
    with pytest.raises(InputError, match="exists already"):
        export_training(trained, tmp_path / "other.safetensors", out[1], trained / "commits")
    with pytest.raises(InputError, match=r"expected a name that ends in \.safetensors"):
        export_training(trained, tmp_path / "m.pt", out[1], trained / "commits")


def test_two_files_never_have_one_name(trained: Path, tmp_path: Path) -> None:
    to, commits = tmp_path / "same.safetensors", trained / "commits"
    (tmp_path / "other").symlink_to(tmp_path)
    for name in ("same", "other/same", "same-00001-of-00002"):
        with pytest.raises(InputError, match="would be a file of the model and the optimizer's"):
            export_training(trained, to, tmp_path / f"{name}.safetensors", commits, shard_bytes=99)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_an_export_is_whole_or_not_there(trained: Path, tmp_path: Path) -> None:
    commits, to = trained / "commits", tmp_path / "m.safetensors"
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="cannot write"):
        export_training(trained, to, tmp_path / "file" / "o.safetensors", commits)
    with pytest.raises(InputError, match="cannot write"):
        export_training(trained, tmp_path / "file" / to.name, tmp_path / "o.safetensors", commits)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    export_training(trained, to, tmp_path / "o.safetensors", commits)
    second = export_training(
        trained, tmp_path / "m2.safetensors", tmp_path / "o2.safetensors", commits
    )
    second.loader.write_text("another's")
    with pytest.raises(InputError, match="is another file") as refused:
        export_training(trained, tmp_path / "m3.safetensors", tmp_path / "o3.safetensors", commits)
    assert "another folder" in str(refused.value.help)


def test_an_earlier_commit_is_gone_back_to(trained: Path, tmp_path: Path) -> None:
    commits = tmp_path / "commits"
    subprocess.run(["cp", "-r", str(trained / "commits"), str(commits)], check=True)
    assert [record.step for record in list_commits(commits, print)] == [4, 2, 0]
    with pytest.raises(InputError, match="there is no checkpoint of step 3"):
        rollback(commits, 3, print)
    assert rollback(commits, 4, print) == []
    aside = rollback(commits, 2, print)
    assert [path.name for path in aside] == ["commit-4.json.set-aside"]
    again = train(trained, 6, "--checkpoint-dir", commits, "--checkpoint-every", "0", "--resume")
    assert again == train(trained, 6)[2:]
    assert [record.step for record in list_commits(commits, print)] == [6, 2, 0]  # --keep 5 holds
    assert not list(commits.glob("*.set-aside"))  # no record without its states
    train(trained, 7, "--checkpoint-dir", commits, "--resume", "--keep", "2")
    assert [record.step for record in list_commits(commits, print)] == [7, 6]


def test_a_broken_commit_is_not_gone_back_to(trained: Path, tmp_path: Path) -> None:
    commits = tmp_path / "commits"
    subprocess.run(["cp", "-r", str(trained / "commits"), str(commits)], check=True)
    file = commits / "commit-2-g1" / "d0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="checkpoint of step 2 is broken"):
        rollback(commits, 2, print)
    assert [record.step for record in list_commits(commits, print)] == [4, 2, 0]


# --------------------------------------------------------------------------- validation

SCRIPT = """
import sys
from safetensors.torch import load_file
weights = load_file(sys.argv[1])
print("a line of its own")
print(WHAT)
"""


def validated(trained: Path, script: Path, what: str) -> Validation:
    """Validate the commits of a run of which nothing had been validated."""
    script.write_text(SCRIPT.replace("WHAT", what))
    found: list[Validation] = []
    with validations(trained, script, trained / "commits", found.append) as hear:
        hear(0)
    assert found == []  # there was no commit after it had begun
    watcher = Validator(trained, script, trained / "commits", found.append)
    watcher.seen = 0
    watcher.hear_step(0)
    watcher.close()
    (only,) = found
    return only


def test_a_script_validates_the_newest_commit(trained: Path, tmp_path: Path) -> None:
    what = '\'{"loss": %g, "tensors": %d}\' % (2.5, len(weights))'
    found = validated(trained, tmp_path / "check.py", what)
    assert (found.step, found.values, found.failure) == (4, {"loss": 2.5, "tensors": 6.0}, "")
    assert str(found) == "validation at step 4: loss 2.5   tensors 6"


@pytest.mark.parametrize(
    ("what", "said"),
    [("'good'", "expected a number or a JSON object"), ("1 / 0", "code 1: ZeroDivisionError")],
)
def test_a_script_that_fails_ends_nothing(
    trained: Path, tmp_path: Path, what: str, said: str
) -> None:
    found = validated(trained, tmp_path / "check.py", what)
    assert said in found.failure
    assert str(found).startswith("WARNING: no validation at step 4: ")


def test_validation_needs_a_script_and_commits(trained: Path, tmp_path: Path) -> None:
    for script, commits, said in (
        (tmp_path / "none.py", trained / "commits", "there is no file"),
        (trained / "train.py", None, "this run writes none"),
    ):
        with pytest.raises(InputError, match=said), validations(trained, script, commits, print):
            pass
