"""Names of cards: as a preset, a user, nvidia-smi and torch write them; and what is none."""

from __future__ import annotations

import pytest

from bigbrain_fx.cluster import PRESETS, BadValueError, assumed, parse_cluster
from bigbrain_fx.cluster.presets import preset_name
from bigbrain_fx.core import Graph, Param, TensorSpec
from tests.support.messages import refused


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


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("V100", "BX1026"),
        ("GeForce RTX 3060", "BX1026"),
        ("A100 PCIe", "BX1026"),
        ("H100-80", "BX1026"),
        ("T4 8GB", "BX1028"),
        ("RTX 3900", "BX1028"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "BX1025"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "BX1025"),
    ],
)
def test_a_name_of_no_card_or_of_several_says_which(name: str, code: str) -> None:
    with refused(code, BadValueError):
        preset_name(name)


def test_a_blank_is_near_to_no_card() -> None:
    with refused("BX1028", BadValueError):
        preset_name("")


def test_the_source_of_a_presets_rates_is_named() -> None:
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


def test_a_card_with_a_host_of_its_own_starts_ops_as_that_does() -> None:
    usual_s = PRESETS["a100-80"].launch_s
    assert usual_s is not None
    assert PRESETS["h200"].launch_s == usual_s
    assert PRESETS["gh200-96"].launch_s == pytest.approx(1.29 * usual_s)
