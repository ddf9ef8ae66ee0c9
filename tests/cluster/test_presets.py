"""Names of cards: as a preset, a user, nvidia-smi and torch write them; and what is none."""

from __future__ import annotations

import pytest

from bigbrain_fx.cluster import PRESETS, BadValueError, assumed, parse_cluster
from bigbrain_fx.cluster.presets import preset_name
from bigbrain_fx.core import Graph, Param, TensorSpec


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla P100-PCIE-16GB", "p100-16"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI250X", "mi250x"),
        ("A100 80 GB", "a100-80"),
        ("4060 Ti 16gb", "rtx-4060-ti-16"),
    ],
)
def test_a_preset_is_found_as_its_driver_names_it(name: str, known: str) -> None:
    assert preset_name(name) == known


def test_every_preset_is_found_by_its_own_name() -> None:
    assert [preset_name(name) for name in PRESETS] == list(PRESETS)


@pytest.mark.parametrize(
    ("name", "what", "help"),
    [
        ("V100", "there are 4 of unlike memory or power", "v100-16, v100-32, "),
        ("GeForce RTX 3060", "there are 2 of unlike memory or power", "rtx-3060-8, rtx-3060-12"),
        ("A100 PCIe", "there are 2 of unlike memory or power", "a100-40-pcie, a100-80-pcie"),
        ("H100-80", "there are 2 of unlike memory or power", "h100, h100-pcie; write which"),
        ("T4 8GB", 'unknown preset "T4 8GB"', "nearest: t4; known: "),
        ("RTX 3900", 'unknown preset "RTX 3900"', "nearest: rtx-3090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "it is slower than the card", "write memory"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "it is slower than the card", "write memory"),
    ],
)
def test_a_name_of_no_card_or_of_several_says_which(name: str, what: str, help: str) -> None:
    with pytest.raises(BadValueError) as raised:
        preset_name(name)
    assert what in raised.value.what
    assert help in raised.value.help


def test_a_blank_is_near_to_no_card() -> None:
    with pytest.raises(BadValueError) as raised:
        preset_name("")
    assert raised.value.help.startswith("known: ")


def test_what_a_forecast_rests_on_is_said() -> None:
    entry = '"preset": "t4", "matmul_precision": "high"'
    two = f'{{"devices": [{{"name": "a", {entry}}}, {{"name": "b", {entry}}}]}}'
    graph = Graph("tiny", (), (), (), (), None, autocast="bfloat16")
    card, lacks, tf32, wire = assumed(parse_cluster(two, "cluster.json"), graph)
    assert "a, b: t4 by its datasheet" in card
    assert "t4 has no units for bfloat16" in lacks
    assert "t4 has no TF32" in tf32
    assert "PCIe 3.0" in wire


def test_a_model_in_half_precision_is_said_as_autocast_is() -> None:
    weight = Param("w", TensorSpec((2, 2), "bfloat16", (2, 1), requires_grad=True), "w")
    graph = Graph("tiny", (), (), (weight,), (), None)
    found = assumed(parse_cluster('{"devices": [{"name": "a", "preset": "v100-16"}]}', "x"), graph)
    assert any("v100-16 has no units for bfloat16" in text for text in found)
