"""Parts of a cluster file: zones, prices, cards, and traces of devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.cluster import (
    PRESETS,
    BadValueError,
    assumed,
    parse_cluster,
    read_availability,
    to_json,
)
from bigbrain_fx.cluster.presets import preset_name
from bigbrain_fx.core import KERNELS, Cluster, Graph, Link, Param, Period, TensorSpec, Zone
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device

CPU = {"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"}
SLOW = {"bandwidth": "1Gbit/s", "latency": "30ms"}
NEAR = {"bandwidth": "10Gbit/s", "latency": "0.1ms"}
TABLE = {"64KiB": "0.1GB/s", "1MiB": "0.5GB/s"}


def file_of(on: str, links: dict[str, Any], **more: Any) -> str:
    """Write a file of a device on each host "a0", "b1", ..., which stands in zone "a", "b", ..."""
    hosts = on.split()
    devices = [{"name": f"on-{host}", "host": host, **CPU} for host in hosts]
    stand = [
        {"name": z, "hosts": [h for h in hosts if h[0] == z]} for z in sorted(set(on) - {*"012 "})
    ]
    return json.dumps({"devices": devices, "links": links, "zones": stand, **more})


def read(text: str) -> Cluster:
    """Parse it; what is written again is the same."""
    found = parse_cluster(text, "cluster.json")
    assert parse_cluster(to_json(found), "again.json") == found
    return found


def test_two_zones_are_linked_by_one_entry() -> None:
    links = {"default": NEAR, "between": [{"zones": ["a", "b"], **SLOW, "price_per_gb_usd": 0.02}]}
    found = read(file_of("a0 a1 b0 b1", links))
    assert found.zones == (Zone("a", ("a0", "a1")), Zone("b", ("b0", "b1")))
    assert found.zone == {"on-a0": "a", "on-a1": "a", "on-b0": "b", "on-b1": "b"}
    far = Link(0.03, 125e6, usd_per_gb=0.02)
    assert {found.link(a, b) for a in ("on-a0", "on-a1") for b in ("on-b0", "on-b1")} == {far}
    assert found.link("on-a0", "on-a1") == Link(1e-4, 1.25e9)


def test_hosts_win_over_zones_and_two_zones_over_all() -> None:
    between = [
        {"zones": ["a", "b"], **NEAR},
        {"zones": ["a", "a"], "bandwidth": "2GB/s", "latency": "0s"},
        {"hosts": ["a0", "b0"], "bandwidth": "3GB/s", "latency": "0s"},
    ]
    found = read(file_of("a0 a1 b0 c0", {"between_zones": SLOW, "between": between}))
    assert found.link("on-a0", "on-b0").bytes_per_s == 3e9
    assert found.link("on-a1", "on-b0").bytes_per_s == 1.25e9
    assert found.link("on-a0", "on-a1").bytes_per_s == 2e9
    assert found.link("on-c0", "on-b0") == Link(0.03, 125e6)


@pytest.mark.parametrize(
    ("text", "code", "at"),
    [
        (file_of("a0 b0", {"default": NEAR}), "BX1051", "links"),
        (file_of("a0 b0", {"between": [{"zones": ["a", "c"], **SLOW}]}), "BX1000", "zones[1]"),
        (file_of("a0 b0", {}, zones=[{"name": "a", "hosts": ["a0"]}]), "BX1056", "zones"),
        (file_of("a0", {}, zones=[{"name": "a", "hosts": []}]), "BX1057", "zones[0].hosts"),
        (file_of("a0", {}, zones=[{"name": "a", "hosts": ["a0", "a0"]}]), "BX1055", "hosts[1]"),
        (file_of("a0", {}, zones=[{"name": "a", "hosts": ["a0"]}] * 2), "BX1054", "zones[1].name"),
        (file_of("a0", {}, zones=[{"name": "a", "hosts": ["x"]}]), "BX1000", "zones[0].hosts[0]"),
    ],
)
def test_a_zone_that_is_not_whole_is_refused(text: str, code: str, at: str) -> None:
    with refused(code) as caught:
        parse_cluster(text, "cluster.json")
    assert str(caught.value.at).endswith(at)


def test_the_remedy_for_a_zone_without_links_is_one() -> None:
    read(file_of("a0 b0", {"between": [{"zones": ["a", "b"], **SLOW}]}))
    read(file_of("a0 b0", {"between_zones": SLOW}))


@pytest.mark.parametrize("wrong", [-1, "2.1", True, 1e999, [], "2.1USD/h"])
def test_a_price_is_a_number(wrong: object) -> None:
    text = json.dumps({"devices": [{"name": "d0", **CPU, "price_per_hour_usd": wrong}]})
    with refused("BX1006" if wrong == 1e999 else "BX1058") as caught:
        parse_cluster(text, "cluster.json")
    assert str(caught.value.at).endswith("devices[0].price_per_hour_usd")


def test_devices_have_the_prices_that_were_given() -> None:
    text = json.dumps({"devices": [{"name": n, **CPU, **own} for n, own in PRICED.items()]})
    found = read(text)
    assert found.price == {"d0": 2.5, "d1": 0.0}
    assert found.devices[0] == parse_cluster(text, "c").devices[0]


PRICED: dict[str, dict[str, object]] = {
    "d0": {"price_per_hour_usd": 2.5},
    "d1": {"price_per_hour_usd": 0},
    "d2": {},
}


def test_small_messages_have_their_rate() -> None:
    link = read(file_of("a0", {"default": {**NEAR, "bandwidth_by_size": TABLE}})).default_link
    kib, mib = 2**16 / 1e8, 2**20 / 5e8
    assert link.wire_s(2**10) == 2**10 / 1e8
    assert link.wire_s(2**16) == kib
    assert link.wire_s(2**20) == mib
    assert link.wire_s((2**16 + 2**20) // 2) == pytest.approx((kib + mib) / 2)
    assert link.wire_s(2**30) == pytest.approx(mib + (2**30 - 2**20) / 1.25e9)
    assert link.transfer_s(2**16) == 1e-4 + kib


def test_a_nic_slows_messages_of_every_size() -> None:
    links = {"default": {**NEAR, "bandwidth_by_size": TABLE}}
    found = read(file_of("a0 a1", links, hosts=[{"name": "a0", "nic": "0.2GB/s"}]))
    wire = found.wire("on-a0", "on-a1")
    assert (wire.bytes_per_s, wire.by_size) == (2e8, ((2**16, 1e8), (2**20, 2e8)))


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"1MiB": "2GB/s"}, "BX1052"),
        ({"64KiB": "1MB/s", "65KiB": "1GB/s"}, "BX1053"),
        ({"many": "1GB/s"}, "BX1030"),
        ({"1MiB": 5}, "BX1029"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table: dict[str, object], code: str) -> None:
    with refused(code) as caught:
        parse_cluster(file_of("a0", {"default": {**NEAR, "bandwidth_by_size": table}}), "c.json")
    assert "links.default.bandwidth_by_size" in str(caught.value.at)


def _text(kernels: Mapping[str, object]) -> str:
    return json.dumps({"devices": [{"name": "a", "preset": "l4", "kernels": kernels}]})


def test_timed_kernels_come_back_in_their_own_order() -> None:
    given = {KERNELS[3].name: "12ms", KERNELS[0].name: "3.2ms"}
    cluster = parse_cluster(_text(given), "x")
    found = cluster.devices[0].kernels
    assert [name for name, _ in found] == [KERNELS[0].name, KERNELS[3].name]
    assert [took_s for _, took_s in found] == pytest.approx([3.2e-3, 12e-3])
    assert parse_cluster(to_json(cluster), "y") == cluster


@pytest.mark.parametrize(
    ("kernels", "code"),
    [
        ({"linear-half-8192x4096x409": "4ms"}, "BX1049"),
        ({KERNELS[0].name: "0s"}, "BX1050"),
        ({KERNELS[0].name: "-1ms"}, "BX1031"),
        ({KERNELS[0].name: 0.004}, "BX1029"),
    ],
)
def test_values_that_are_no_timed_kernel_are_refused(kernels: dict[str, object], code: str) -> None:
    with refused(code):
        parse_cluster(_text(kernels), "x")


# --------------------------------------------------------------------------- cards


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


# --------------------------------------------------------------------------- traces


WHERE = cluster_of(device("a0"), device("a1"))


def written(folder: Path, *changes: tuple[float, list[str]], **more: object) -> Path:
    path = folder / "trace.json"
    entries = [{"from_h": hour, "devices": names} for hour, names in changes]
    whole = {"format": "availability-1", "until_h": 8, "changes": entries, **more}
    path.write_text(json.dumps(whole))
    return path


def test_each_list_holds_until_the_next(tmp_path: Path) -> None:
    path = written(tmp_path, (0, ["a0", "a1"]), (2.5, ["a0"]))
    assert read_availability(path, WHERE) == (
        Period(0.0, 2.5, ("a0", "a1")),
        Period(2.5, 8.0, ("a0",)),
    )


@pytest.mark.parametrize(
    ("changes", "more", "code"),
    [
        ([(0, ["a0"])], {"format": "2"}, "BX1060"),
        ([], {}, "BX1060"),
        ([(0, ["a0"])], {"until_h": -1}, "BX1060"),
        ([(0, ["a0"])], {"until": 3}, "BX1060"),
        ([(1, ["a0"])], {}, "BX1061"),
        ([(0, ["a0"]), (0, ["a1"])], {}, "BX1062"),
        ([(0, ["a0"])], {"until_h": 0}, "BX1062"),
        ([(0, ["a0"]), (2, [])], {}, "BX1063"),
        ([(0, ["a0", "a2"])], {}, "BX1064"),
    ],
)
def test_files_that_are_no_trace_are_refused(
    tmp_path: Path, changes: list[tuple[float, list[str]]], more: dict[str, object], code: str
) -> None:
    path = written(tmp_path, *changes, **more)
    with refused(code) as caught:
        read_availability(path, WHERE)
    assert str(caught.value.at).startswith(str(path))


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with refused("BX1059"):
        read_availability(tmp_path / "none.json", WHERE)
    (tmp_path / "half.json").write_text("{")
    with refused("BX1060"):
        read_availability(tmp_path / "half.json", WHERE)
