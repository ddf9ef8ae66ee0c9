"""The table of forms of training code: what it reads, what it writes, and (promise) every form."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.conformance.apart import apart
from tools.conformance.forms import Form, find, forms
from tools.conformance.forms.judge import judge


def test_a_remedy_is_a_form_that_trains() -> None:
    named = {form.name: form for form in forms()}
    assert len(named) == len(forms()) >= 60
    for form in forms():
        if form.expected in ("right", "warned"):  # whose remedy is --micro-batches 1
            assert not form.remedy, form.name
        else:
            assert named[form.remedy].expected in ("right", "warned"), form.name


def test_a_cell_is_a_model_file() -> None:
    form = find("graph-batch-whole")
    assert (form.family, form.micro_batches, form.expected) == ("batches", 1, "right")
    assert find("module-backward-hook-leaf").leaves == ("Scaled",)
    for each in forms():
        compile(each.source, each.name, "exec")


def test_a_form_is_judged_as_if_nothing_else_had_been_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle imports its own files by name; an earlier test may have loaded others."""
    other = ModuleType("model")
    other.__dict__["__bigbrain_fx__"] = True
    monkeypatch.setitem(sys.modules, "model", other)
    device = ModuleType("device_d1")
    device.__file__ = str(tmp_path / "bundle/device_d1.py")
    monkeypatch.setitem(sys.modules, "device_d1", device)
    names = {"model", "device_d1"}
    found = apart(lambda: {"loaded": str(names & sys.modules.keys())}, tmp_path)
    assert found == {"loaded": "set()"}
    assert sys.modules["model"] is other


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
@pytest.mark.filterwarnings("default")  # a user's file may warn
@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_every_form(form: Form) -> None:
    found = judge(form)
    assert found.status == form.expected, found.detail
    assert found.status not in ("refused", "stopped") or found.help
