"""The first link of `verify`: the user's loop in plain PyTorch, and what it catches."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.bundles.verifying import Check, Verification, verify
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.modelfile import ModelFile
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime import Training
from bigbrain_fx.verification import eager, laid_tensors
from bigbrain_fx.verification.loop import lacking
from bigbrain_fx.verification.plain import NAME, not_run
from bigbrain_fx.verification.updates import Updates
from tests.support import warm
from tests.support.bundles import MODEL, cluster, split_small
from tests.support.command_line import call

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
PROGRAM = '''"""Compare the plain loop of one model file with the graph of another."""
import json
import sys
from pathlib import Path

from bigbrain_fx.frontend import load_model_file
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime import Training
from bigbrain_fx.verification.child import capture_again
from bigbrain_fx.verification.imported_bundle import weights_of
from bigbrain_fx.verification.loop import plain_loop
from bigbrain_fx.verification.plain import plain_link

bundle, looped = Path(sys.argv[1]), sys.argv[2]
plan = read_plan(bundle)
with plain_loop(plan, bundle, looped, weights_of) as loop:
    file = load_model_file(plan.source.path, seed=plan.seed)
    print(json.dumps(plain_link(loop, file, capture_again(file, plan), plan, steps=2)))
'''
HOOKS = {
    "net.head.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))": "gradient of embed.weight",
    "net.blocks[1].up.weight.register_post_accumulate_grad_hook(halve)": "blocks.1.up.weight",
    "net.blocks[2].register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))": "gradient of",
    "net.norm.register_forward_hook(lambda m, a, out: out * 1.001)": "loss of step 0",
    "net.blocks[3].norm.eps = 2e-3": "loss of step 0",
}
APART = {"net.blocks[3].norm.eps = 2e-3": "blocks.3"}
"""The module of the user's that first gives another result."""
HALVE = """
def halve(parameter):
    parameter.grad *= 0.5


"""


def model_file(folder: Path, more: str, name: str = "letters.py") -> Path:
    """Write the model file with more code at its end: a later definition counts."""
    path = folder / name
    path.write_text(f"{MODEL}\n\n{more}")
    return path


def split(file: Path, devices: int = 2) -> Path:
    options = bb.Options("naive", schedule="1f1b", micro_batches=2)
    return bb.split(file, cluster(devices), file.parent / "bundle", options).bundle


def first(found: Verification) -> Check:
    assert found.checks[0].name == NAME
    return found.checks[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("plain"))


def linked(bundle: Path, looped: Path, folder: Path, first: str = "") -> dict[str, Any]:
    """Compare a bundle's graph with the loop of another model file; `first` is run before."""
    program = folder / "program.py"
    program.write_text(first + PROGRAM)
    done = warm.run(
        [sys.executable, str(program), str(bundle), str(looped)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=warm.DEVNULL,
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --------------------------------------------------------------------------- what it catches


@pytest.mark.gate("net.blocks[3].norm.eps = 2e-3")
@pytest.mark.parametrize("line", HOOKS)
def test_an_op_that_the_graph_dropped_is_found(line: str, bundle: Path, tmp_path: Path) -> None:
    """The same model with a hook, and none in the graph: whatever `split` thinks of hooks."""
    code = f"{HALVE}def model():\n    net = Net()\n    {line}\n    return net\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path)
    check = Check(**found)  # as `verify` reports it
    assert check.passed is False
    assert HOOKS[line] in check.detail
    assert check.apart == APART.get(line, "")


@pytest.mark.nightly
def test_rounding_is_decided_in_float64(bundle: Path, tmp_path: Path) -> None:
    """A hook that loses digits in float32, and changes nothing in exact numbers."""
    line = "net.blocks[1].up.weight.register_hook(lambda g: (g + 100.0) - 100.0)"
    code = f"def model():\n    net = Net()\n    {line}\n    return net\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path)
    assert found["passed"] is True, found["detail"]
    assert re.search(r"gradients to \de-0[1-5] of a tensor's largest", found["detail"])


UNLUCKY = "import bigbrain_fx.verification.plain as plain\nplain._AS_NEAR = -1.0\n"
"""The graph is never as near to the exact gradient as the loop: a small sum may round so."""


@pytest.mark.nightly
@pytest.mark.parametrize(("less", "passed"), [("10.0", True), ("9.999", False)])
def test_a_graph_that_rounded_unluckily_is_judged_in_float64(
    less: str, passed: bool, bundle: Path, tmp_path: Path
) -> None:
    line = f"net.blocks[1].up.weight.register_hook(lambda g: (g + 10.0) - {less})"
    code = f"def model():\n    net = Net()\n    {line}\n    return net\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path, UNLUCKY)
    assert found["passed"] is passed, found["detail"]
    assert ("gradient of blocks.1.up.weight differs" in found["detail"]) is not passed


class Summing(torch.optim.SGD):
    """Rounds otherwise when it has more parameters; with `norm`, divides by all their norms."""

    norm = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in params if p.grad is not None]
        whole = torch.stack([g.norm() for g in gradients]).norm() if self.norm else 1.0
        for p, g in zip(params, gradients, strict=True):
            p.sub_(g * 0.1 / whole if len(params) > 1 else g / whole * 0.3 / 3)


@pytest.mark.parametrize("norm", [False, True])
def test_an_optimizer_per_device_is_compared_with_one(norm: bool, tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(0)
    before, given = ({n: torch.randn(50, generator=dice) for n in "ab"} for _ in range(2))

    def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> Summing:
        made = Summing([p for _, p in named])
        made.norm = norm
        return made

    after = {n: nn.Parameter(t.clone()) for n, t in before.items()}
    for name, parameter in after.items():
        parameter.grad = given[name]
    optimizer(list(after.items())).step()
    file = ModelFile(tmp_path, "model", nn.Identity(), None, optimizer=optimizer)
    updates = Updates(file, {"d0": {"a"}, "d1": {"b"}}, file)
    laid_tensors.save(before, tmp_path / "state")
    updates.take(0, before, given, {n: p.detach() for n, p in after.items()}, tmp_path)
    found = updates.differences()
    assert len(found) == (2 if norm else 0)
    assert all("is updated otherwise" in line for line in found)
    assert norm or updates.said == "to rounding"


def test_a_bundle_with_another_rate_than_the_file_is_found(tmp_path: Path) -> None:
    before = {"a": torch.ones(2)}
    file = ModelFile(tmp_path, "model", nn.Identity(), None, optimizer=sgd(0.1))
    updates = Updates(file, {"d0": {"a"}}, Training(optimizer=sgd(0.2)))
    laid_tensors.save(before, tmp_path / "state")
    updates.take(0, before, {"a": torch.ones(2)}, {"a": torch.full((2,), 0.9)}, tmp_path)
    assert "step 0: a is updated otherwise" in updates.differences()[0]


def sgd(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "less", [pytest.param("    net.blocks[1].drop.eval()\n", marks=pytest.mark.nightly), ""]
)
def test_draws_elsewhere_are_never_equal(less: str, bundle: Path, tmp_path: Path) -> None:
    code = f"def model():\n    net = Net()\n{less}    net.norm = "
    code += "nn.Sequential(net.norm, nn.Dropout(0.5))\n    return net\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path)
    assert found["passed"] is False


@pytest.mark.nightly
def test_a_draw_that_nothing_reads_is_no_difference(bundle: Path, tmp_path: Path) -> None:
    """The last coin of teacher forcing, say: the graph has left it out."""
    hook = "net.norm.register_forward_hook(lambda m, a, out: (torch.rand(3), None)[1])"
    code = f"def model():\n    net = Net()\n    {hook}\n    return net\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path)
    assert found["passed"] is True, found["detail"]


@pytest.mark.nightly
def test_a_loop_that_fails_is_no_difference(bundle: Path, tmp_path: Path) -> None:
    code = "def lr_scale(step):\n    raise RuntimeError('no scale')\n"
    found = linked(bundle, model_file(tmp_path, code, "looped.py"), tmp_path)
    assert found["passed"] is None
    assert "RuntimeError: no scale (looped.py:" in found["detail"]


# --------------------------------------------------------------------------- what passes


@pytest.mark.nightly
def test_the_command_names_it_first(bundle: Path) -> None:
    done = call("verify", bundle, "--steps", "1", "--json")
    assert done.objects[0]["checks"][0]["name"] == "plain PyTorch = captured graph"


# --------------------------------------------------------------------------- what is not run


def test_a_model_larger_than_the_host_is_not_run(bundle: Path) -> None:
    plan = read_plan(bundle)
    assert lacking(plan) == ""
    reason = lacking(plan, available=100_000)
    assert "GiB of memory" in reason
    check = Check(**not_run(reason))  # type: ignore[arg-type]
    found = Verification((check, Check("weights = your model's", True, "all")))
    assert str(found).startswith(f"not run  {NAME}: it needs")
    assert "equal" not in str(found).splitlines()[0]
    found.require_passed()


VARYING = """
def batches(seed):
    for step in itertools.count():
        rows = torch.randint(27, (8, 6 + {more}), generator=torch.Generator().manual_seed(step))
        yield {{"letters": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}}
        if step == {last}:
            return
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "last", "what", "help_"),
    [
        (
            "(step > 64)",
            99,
            "step 65: batch entry 'letters' is torch.int64",
            "say pad or drop_last",
        ),
        ("0", 2, "ended before step 3", "use fewer --steps"),
    ],
)
def test_data_that_do_not_fit_are_an_error(
    more: str, last: int, what: str, help_: str, tmp_path: Path
) -> None:
    """`split` has read the first 64 batches; these do not fit, or are lacking, later."""
    bundle = split(model_file(tmp_path, VARYING.format(more=more, last=last)))
    with pytest.raises(InputError, match=what) as error:
        verify(bundle, steps=min(last, 66) + 2, time_limit_s=LIMIT_S)
    assert error.value.at == "letters.py: batches"
    assert help_ in str(error.value.help)
    if last == 2:
        assert verify(bundle, steps=3, time_limit_s=LIMIT_S).passed  # the remedy


@pytest.mark.nightly
def test_an_edit_that_fails_is_an_error(tmp_path: Path) -> None:
    bundle = split_small(tmp_path)
    training = bundle / "training.py"
    training.write_text(training.read_text().replace("return 1.0 /", "return nothing /"))
    with pytest.raises(InputError, match="NameError: name 'nothing' is not defined") as error:
        verify(bundle, steps=1, time_limit_s=LIMIT_S)
    assert str(error.value.at).startswith("training.py:")
    assert "train.py --in-process --steps 1" in str(error.value.help)


def test_the_loop_knows_no_graph() -> None:
    """It imports nothing that traces, runs a graph, or is our own reference."""
    allowed = {
        *(
            "ModelFile",
            "load_model_file",
            "module_name",
            "where",
        ),  # model file, batch
        *("Route", "route", "settle", "call_of", "Call", "UserStep"),  # how a batch reaches forward
        *(
            "Key",
            "reseed",
            "States",
            "states",
            "set_states",
        ),  # of draws.py, which is read here, too
        *("needs_closure", "needs_metrics"),  # what step() of an optimizer or scheduler asks for
        "keep_sparse_apart",  # which buffers of a model no state dict of a bundle has
        "LossCount",  # by which count micro-batches weigh
        "Results",  # notes what modules give; it is compared with a graph elsewhere
        *("LOOP", "TrainingLoop", "laid_tensors", "plain_batches"),
    }
    own = ("eager", "opaque_loop", "draws", "plain_batches", "laid_tensors")
    folder = Path(eager.__file__).parent
    trees = [ast.parse((folder / f"{name}.py").read_text()) for name in own]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = [node for node in nodes if (node.module or "").startswith("bigbrain_fx")]
    assert {alias.name for node in ours for alias in node.names} <= allowed
