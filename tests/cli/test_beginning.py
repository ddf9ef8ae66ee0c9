"""However Python is started, a bundle trains and a model is split; or one sentence says why not."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from bigbrain_fx.runtime import limits
from tests.support import warm
from tests.support.command_line import write_cluster, write_model

LIMIT_BYTES = 600 << 20  # torch is mapped, and what comes after it is not
DEADLINE_S = 120.0
TRAINS = ("train.py", "--in-process", "--steps", "1")
LAUNCHES = ("launch.py", "--steps", "1")


def _limited(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _python(
    *words: str,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    limit: int | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, *words],
        env={**os.environ, **(environment or {})},
        preexec_fn=None if limit is None else partial(_limited, limit),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def _fork(
    *words: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it as a fork of a process that has torch: the path is that of a new Python."""
    return warm.run(
        [sys.executable, *flags, *words],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.gate("-P-entry0")
@pytest.mark.parametrize("entry", [TRAINS, LAUNCHES])
@pytest.mark.parametrize("how", ["-P", "-I", "PYTHONSAFEPATH"])
def test_the_folder_of_a_bundle_need_not_be_on_the_path(
    how: str, entry: tuple[str, ...], bundle: Path
) -> None:
    flags = [how] if how.startswith("-") else []
    environment = {} if flags else {how: "1"}
    program, *words = entry
    python = _fork if how == "-P" else _python
    done = python(str(bundle / program), *words, flags=flags, environment=environment)
    assert (done.returncode, "step     0   loss" in done.stdout) == (0, True), done.stderr


def _one_sentence(
    done: subprocess.CompletedProcess[str], *words: str, codes: Sequence[int] = (2,)
) -> None:
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def _named(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """A bundle that is not whole says with Python's words what it lacks."""
    assert done.returncode, done.stdout
    assert all(word in done.stderr for word in words), done.stderr


def test_a_python_without_torch_is_named(bundle: Path) -> None:
    train = str(bundle / "train.py")
    _one_sentence(_python(train, flags=["-S"]), "No module named 'torch'", "install torch")


def test_a_file_of_the_runtime_that_is_gone_is_the_bundles(bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(bundle, copied)
    (copied / "runtime" / "gradients.py").unlink()
    done = _fork(str(copied / "train.py"), *TRAINS[1:])
    _named(done, "No module named 'runtime.gradients'")


@pytest.mark.nightly
@pytest.mark.parametrize("gone", ["device_d1.py", "training.py", "runtime", "supervisor"])
def test_a_part_of_a_bundle_that_is_gone_is_named(gone: str, bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(bundle, copied, ignore=lambda *_: [gone])
    program, *words = LAUNCHES if gone == "supervisor" else TRAINS
    _named(_python(str(copied / program), *words), f"No module named '{Path(gone).stem}'")


@pytest.mark.nightly
def test_a_syntax_error_of_an_edited_file_is_named(bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(bundle, copied)
    with (copied / "training.py").open("a") as file:
        file.write("import nowhere_at_all\n")
    _named(_python(str(copied / "train.py"), *TRAINS[1:]), "nowhere_at_all", "training.py")
    with (copied / "training.py").open("a") as file:
        file.write("def (\n")
    for program, *words in (TRAINS, LAUNCHES):
        done = _python(str(copied / program), *words)
        _named(done, "training.py", "invalid syntax")


@pytest.mark.nightly
def test_a_setting_that_torch_refuses_is_named(tmp_path: Path) -> None:
    environment = {"TORCH_LOGS": "nonsense"}
    remedy = "unset TORCH_LOGS, or see TORCH_LOGS=help"
    _one_sentence(_split(tmp_path, environment=environment), "nonsense", remedy)


@pytest.mark.nightly
def test_a_limit_of_memory_is_named(bundle: Path, tmp_path: Path) -> None:
    program, *words = TRAINS
    for done in (
        _python(str(bundle / program), *words, limit=LIMIT_BYTES),
        _split(tmp_path, limit=LIMIT_BYTES),
    ):
        _one_sentence(done, "memory has run out", "ulimit -v", codes=(2, limits.SHORT))


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    """MKL would end the process, and name a file of torch's."""
    gone = tmp_path / "gone"
    gone.mkdir()
    text = f"import os, sys; os.rmdir({str(gone)!r}); os.execv(sys.executable, sys.argv[1:])"
    done = _python("-c", text, sys.executable, *_split_words(tmp_path), cwd=gone)
    _one_sentence(done, "the working directory has been removed", "cd to one that is there")


def _split_words(folder: Path) -> list[str]:
    model, cluster = write_model(folder), write_cluster(folder)
    out = str(folder / "out")
    return ["-m", "bigbrain_fx", "split", str(model), "--devices", str(cluster), "--out", out]


def _split(
    folder: Path, environment: Mapping[str, str] | None = None, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    return _python(*_split_words(folder), environment=environment, limit=limit)


@pytest.mark.nightly
def test_files_are_read_alike_in_every_locale(tmp_path: Path) -> None:
    """Where Python takes ASCII for the encoding of files, ours are UTF-8 all the same."""
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = _split(tmp_path, environment=plain)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_warnings_as_errors_leave_no_traceback(tmp_path: Path) -> None:
    done = _split(tmp_path, environment={"PYTHONWARNINGS": "error"})
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def _unread(*words: str | Path) -> tuple[int, str]:
    """Run a command whose stdout has no reader any more; return its exit code and stderr."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "bigbrain_fx", *map(str, words)]
    with subprocess.Popen(command, stdout=writes, stderr=subprocess.PIPE, text=True) as process:
        os.close(writes)
        _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said


@pytest.mark.nightly
def test_a_reader_that_is_gone_fails_no_run_and_is_told(bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    logs = tmp_path / "logs"  # not in the bundle, which other tests compare
    code, said = _unread("run", bundle, "--steps", "2", "--save", saved, "--logs", logs)
    assert code == 0, said
    assert "what it came to was not written: nobody read it" in said
    assert list(saved.glob("*.safetensors"))
    code, said = _unread("plugins")
    assert (code, said) == (
        1,
        "error[BX3590]: stdout cannot be written (Broken pipe); what it would have said is lost\n"
        "  help: let stdout go elsewhere\n",
    )
