"""Every identifier of a bundle is a Python name that hides nothing."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn

from bigbrain_fx.emit.modules.names import (
    OWN,
    RESERVED,
    Names,
    device_names,
    identifier,
    is_attribute,
)
from bigbrain_fx.runtime.modules import Stage
from tests.support.examples import examples

odd = st.text(st.sampled_from("aZ_09.'\" \n\\é字-()"), max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hidden", "hidden"),
        ("blocks.0.norm", "blocks_0_norm"),
        ("0", "_0"),
        ("class", "class_"),
        ("match", "match_"),
        ("sum", "sum_"),
        ("torch", "torch_"),
        ("self", "self_"),
        ("m", "m_"),
        ("", "value"),
        ("字", "value"),
        ('a"b\n', "a_b"),
        ("__x__", "x"),
    ],
)
def test_identifier(text: str, expected: str) -> None:
    assert identifier(text) == expected


@pytest.mark.nightly
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=10), odd, st.sampled_from(sorted(RESERVED))))
def test_any_text_becomes_a_name(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert not keyword.iskeyword(name)
    assert name not in RESERVED
    assert identifier(name) == name


@pytest.mark.parametrize(
    ("devices", "modules"),
    [
        (["d0", "d1"], ["device_d0", "device_d1"]),
        (["torch", "json", "train"], ["device_torch", "device_json", "device_train"]),
        (["class", "4090", "rtx.4090"], ["device_class", "device_4090", "device_rtx_4090"]),
        (["gpu-0", "GPU_0"], ["device_gpu_0", "device_gpu_0_2"]),
        (["a-b", "a.b", "a_b_2"], ["device_a_b", "device_a_b_2", "device_a_b_2_2"]),
        (["é", "字", ""], ["device_unnamed", "device_unnamed_2", "device_unnamed_3"]),
    ],
)
def test_files_of_devices(devices: list[str], modules: list[str]) -> None:
    found = device_names(devices)
    assert [found[name].module for name in devices] == modules


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(st.one_of(odd, st.sampled_from(["1_0", "10", "1_0_2", "A", "a"])), unique=True))
def test_no_two_devices_have_a_file_or_a_class_in_common(devices: list[str]) -> None:
    found = device_names(devices).values()
    for names in ([n.module for n in found], [n.program for n in found]):
        assert len(set(names)) == len(devices)
        assert all(name.isidentifier() and name.isascii() for name in names)
    assert all(n.module == n.module.lower() for n in found)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(odd.map(identifier), max_size=20))
def test_no_name_twice(wanted: list[str]) -> None:
    names = Names()
    found = [names.fresh(name) for name in wanted]
    assert len(set(found)) == len(found)


WRITTEN = ("weight", "_x", "conv1", "Linear")


@pytest.mark.parametrize(
    "name", [*WRITTEN, *("0", "class", "a b", 'a"', "a\nb", "é", "", "__dict__", "a.b")]
)
def test_attributes_that_nobody_can_write_are_reached_by_subscript(name: str) -> None:
    assert is_attribute(name) == (name in WRITTEN)


def test_own_names_are_those_of_the_runtime() -> None:
    """A model's child of such a name is reached by subscript: `self["key"]`."""
    added = {name for name in dir(Stage) if not name.startswith("_")} - set(dir(nn.Module))
    assert added == OWN
    assert not any(map(is_attribute, OWN))
