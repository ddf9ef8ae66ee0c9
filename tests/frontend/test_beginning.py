"""Programs that run in a child process with torch: where a library is broken, they say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Child, Task

MODULES = {
    "bigbrain_fx.frontend.child": (),
    "bigbrain_fx.measure.ops.child": (),
    "bigbrain_fx.bundles.dcp_export.child": (),
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
