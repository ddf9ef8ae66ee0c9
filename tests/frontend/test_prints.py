"""What a model file prints, warns, breaks or changes while it is run some dozens of times."""

from __future__ import annotations

import copy
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import Child, Task, capture, child_environment
from bigbrain_fx.frontend.prints import ALIKE, Prints
from bigbrain_fx.frontend.tracing.export import quiet
from bigbrain_fx.frontend.users_code import run_file
from bigbrain_fx.planning.given import class_of
from tests.support.command_line import MODEL, write_cluster, write_model

DEADLINE_S = 120.0


@pytest.fixture
def behind() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _written(behind: io.TextIOWrapper) -> str:
    assert isinstance(behind.buffer, io.BytesIO)
    return behind.buffer.getvalue().decode()


def test_a_line_comes_once_and_lines_alike_a_few_times(behind: io.TextIOWrapper) -> None:
    prints = Prints(behind)
    for number in range(10):
        print("loss", file=prints)
        print("step", number, end="", file=prints)
        print(" of 10", file=prints)
    print("no end", end="", file=prints)
    prints.finish("model.py")
    steps = "".join(f"step {n} of 10\n" for n in range(1, ALIKE))
    left_out = 9 + 10 - ALIKE
    assert _written(behind) == (
        f"loss\nstep 0 of 10\n{steps}no endmodel.py printed {left_out} more lines like these\n"
    )


def test_prints_do_not_change_the_wrapped_stream(behind: io.TextIOWrapper) -> None:
    prints = Prints(behind)
    prints.reconfigure(line_buffering=True)  # as many files do with sys.stdout
    assert (prints.encoding, prints.buffer, prints.writable()) == ("utf-8", behind.buffer, True)


@pytest.mark.nightly
def test_a_split_prints_what_a_model_prints_once_and_all_of_stderr(tmp_path: Path) -> None:
    text = MODEL.replace(
        "    def forward(self, x):\n",
        "    def forward(self, x):\n        print('seen', tuple(x.shape))\n"
        "        print('beware', file=__import__('sys').stderr)\n",
    )
    assert text != MODEL
    model, cluster = write_model(tmp_path, text), write_cluster(tmp_path)
    words = ["split", str(model), "--devices", str(cluster), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "bigbrain_fx", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stderr.count("seen (") <= ALIKE + 1  # one of them with a symbol for a size
    assert f"{model} printed " in done.stderr
    assert done.stderr.count("beware") > ALIKE + 1


# --------------------------------------------------------------------------- warnings


OF_ONE_ROW = "import torch; torch.ops.aten.var.correction(torch.ones(1, 4), [0])"


def stderr_of_a_trial() -> str:
    """Return what torch writes where a child computes a variance of one row."""
    done = subprocess.run(
        [sys.executable, "-c", OF_ONE_ROW],
        env=child_environment(threads=1),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stderr


def test_children_of_ours_log_errors_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert child_environment(threads=1)["TORCH_CPP_LOG_LEVEL"] == "ERROR"


@pytest.mark.nightly
def test_a_trial_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert stderr_of_a_trial() == ""


@pytest.mark.nightly
def test_a_level_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    assert "degrees of freedom" in stderr_of_a_trial()


class Quiet(logging.Handler):
    """Counts."""

    calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        type(self).calls += 1


def test_handlers_of_the_users_hear_what_others_do_not_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("tests.of.handlers")
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [Quiet(), logging.StreamHandler()], False
    before = Quiet.calls
    with quiet():
        assert log.isEnabledFor(logging.INFO)
        log.info("said once")
    assert Quiet.calls == before + 1
    assert "said once" not in capsys.readouterr().err


# --------------------------------------------------------------------------- files that change


MINE = """class Mine:
    name = 'first'

    def partition(self, graph, cluster, costs):
        return None
"""


def _edit(path: Path, old: str, new: str) -> None:
    """Change a file as an editor may: as long as it was, within the second in which it was new."""
    time_ns = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(time_ns, time_ns))


@pytest.fixture
def compiled_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.mark.usefixtures("compiled_files")
def test_an_edit_of_a_model_file_within_a_second_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model_edited_at_once.py"
    path.write_text("RATE = 1\n")
    assert vars(run_file(path, 0))["RATE"] == 1
    _edit(path, "1", "2")
    assert vars(run_file(path, 0))["RATE"] == 2


@pytest.mark.usefixtures("compiled_files")
def test_an_edit_of_a_partitioner_within_a_second_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "mine_edited_at_once.py"
    path.write_text(MINE)
    assert vars(class_of(str(path)))["name"] == "first"
    _edit(path, "first", "other")
    assert vars(class_of(str(path)))["name"] == "other"


# --------------------------------------------------------------------------- broken libraries


MODULES = {
    "bigbrain_fx.frontend.child": (),
    "bigbrain_fx.measure.ops.child": (),
    "bigbrain_fx.bundles.dcp_export.child": (),
    "bigbrain_fx.bundles.dcp_import.child": (),
    "bigbrain_fx.bundles.resplitting.child": (),
    "bigbrain_fx.bundles.onnx_export.child": ("onnx",),
}


def task(module: str, libraries: tuple[str, ...]) -> Task:
    return Task(module, "the work", "{}", "", "", limit_s=60.0, libraries=libraries)


def broken(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new process find a library that cannot be loaded, and that prints."""
    (folder / name).mkdir()
    text = "print('hello')\nraise ImportError('libc.so.9: undefined symbol: nil')\n"
    (folder / name / "__init__.py").write_text(text)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.gate(
    "bigbrain_fx.bundles.dcp_export.child",
    "bigbrain_fx.bundles.resplitting.child",
    "bigbrain_fx.frontend.child",
    "bigbrain_fx.measure.ops.child",
)
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("module", MODULES)
def test_a_broken_library_is_a_sentence_whatever_the_program(
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Exports and resplit imported torch at their top: a traceback, and "ended its process"."""
    libraries = MODULES[module]
    name = libraries[0] if libraries else "torch"
    broken(name, tmp_path, monkeypatch)
    told = rf"{name} cannot be loaded \(ImportError: libc.so.9: undefined symbol: nil\)"
    with Child(task(module, libraries), {}) as child, pytest.raises(InputError, match=told):
        child.ask({"do": "rules", "path": "x"})
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "hello\n")


# --------------------------------------------------------------------------- errors of libraries


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        return h


class Within(Kept):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        return h


class Copies(Kept):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = copy.deepcopy(self.head)(x)
        return h


def square(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def test_a_function_kept_from_compilers_is_named_by_its_decorator() -> None:
    with pytest.raises(CaptureError, match=r"disable\(recursive=False\)") as caught:
        capture(Kept(), torch.randn(6, 8), square, strict=True)
    assert "write @torch.compiler.disable, or leave it out" in (caught.value.help or "")


def test_with_all_that_it_calls_it_is_traced() -> None:
    assert capture(Within(), torch.randn(6, 8), square).graph.ops


def test_a_copied_module_is_told_with_what_to_write() -> None:
    with pytest.raises(CaptureError, match="with the module copy") as caught:
        capture(Copies(), torch.randn(6, 8), square, strict=True)
    assert "functional_call" in (caught.value.help or "")
