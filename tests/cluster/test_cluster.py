"""cluster.json: what it may hold and what it means; `test_cluster_errors` has the mistakes."""

from __future__ import annotations

import ast
import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bigbrain_fx import cluster as room
from bigbrain_fx.cluster import PRESETS, parse_cluster, schema, to_json
from bigbrain_fx.core import Cluster, Device, Host, Link, Overheads, blas_bytes
from tests.support.examples import examples
from tests.support.messages import refused

CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'
LINK = '"bandwidth": "1GB/s", "latency": "50us"'

ISSUE = """{
  "devices": [
    {"name": "d0", "kind": "cpu", "host": "a", "memory": "4GiB", "flops": "60GFLOP/s",
     "memory_bandwidth": "12GB/s", "threads": 1},
    {"name": "d1", "preset": "h200", "host": "b"}
  ],
  "links": {
    "default": {"bandwidth": "1GB/s", "latency": "50us"},
    "between": [{"devices": ["d0", "d1"], "bandwidth": "10Gbit/s", "latency": "0.1ms"}]
  }
}"""


def parse(text: str) -> Cluster:
    return parse_cluster(text, "cluster.json")


def one(fields: str) -> Device:
    """Parse a cluster of one device."""
    return parse(f'{{"devices": [{{"name": "d0", {fields}}}]}}').devices[0]


# --------------------------------------------------------------------------- good files


def test_the_file_of_the_readme() -> None:
    card = PRESETS["h200"]
    assert parse(ISSUE) == Cluster(
        devices=(
            Device("d0", "a", "cpu", 4 * 2**30, 60e9, 12e9, launch_s=5e-6, threads=1),
            Device(
                *("d1", "b", "cuda", card.memory_bytes, card.sustained_flops_per_s),
                card.sustained_memory_bytes_per_s,
                launch_s=10.5e-6,
                half_flops_per_s=card.sustained_half_flops_per_s,
                blas_bytes=32 * 2**20,
                tf32_flops_per_s=card.sustained_tf32_flops_per_s,
                preset="h200",
                units=132,
            ),
        ),
        default_link=Link(latency_s=50e-6, bytes_per_s=1e9),
        links=(("d0", "d1", Link(latency_s=100e-6, bytes_per_s=1.25e9)),),
    )


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("memory_bytes", "24GiB", 24 * 2**30),
        ("memory_bytes", "1.5GiB", 3 * 2**29),
        ("memory_bytes", "80GB", 80 * 10**9),
        ("memory_bytes", "512 MiB", 2**29),
        ("memory_bytes", "7B", 7),
        ("memory_bytes_per_s", "10Gbit/s", 1.25e9),
        ("memory_bytes_per_s", "1GB/s", 1e9),
        ("memory_bytes_per_s", "1GiB/s", 2.0**30),
        ("memory_bytes_per_s", "8bit/s", 1.0),
        ("memory_bytes_per_s", "3.35TB/s", 3.35e12),
        ("launch_s", "0.2ms", 2e-4),
        ("launch_s", "50us", 5e-5),
        ("launch_s", "3s", 3.0),
        ("launch_s", "700ns", 7e-7),
        ("launch_s", "0us", 0.0),
        ("flops_per_s", "312TFLOP/s", 312e12),
        ("flops_per_s", "60GFLOP/s", 60e9),
        ("flops_per_s", "1.5PFLOP/s", 1.5e15),
    ],
)
def test_quantities_have_units(field: str, text: str, expected: float) -> None:
    usual = {"memory_bytes": "4GiB", "memory_bytes_per_s": "12GB/s", "flops_per_s": "60GFLOP/s"}
    fields = f'{CPU}, "launch": "5us"'.replace(usual.get(field, "5us"), text)
    assert getattr(one(fields), field) == expected


@pytest.mark.parametrize("name", ["rtx-3090", "RTX 3090", "rtx3090", "RTX_3090"])
def test_a_preset_is_found_however_it_is_written(name: str) -> None:
    device = one(f'"preset": "{name}"')
    assert (device.kind, device.memory_bytes) == ("cuda", 24 * 10**9)
    card = PRESETS["rtx-3090"]
    assert (card.flops_per_s, card.memory_bytes_per_s) == (35.6e12, 936e9)
    assert device.flops_per_s == card.sustained_flops_per_s < card.flops_per_s
    assert device.memory_bytes_per_s == card.sustained_memory_bytes_per_s < 936e9


def test_common_gpus_have_presets_with_a_source() -> None:
    wanted = "v100-16 v100-32 a100-40 a100-80 h100 h200 l4 t4 rtx-3090 rtx-4090 a6000"
    assert set(wanted.split()) <= set(PRESETS)
    assert all(card.source.startswith(("NVIDIA", "AMD")) for card in PRESETS.values())
    assert len(PRESETS) >= 12 + 30
    assert all(0 < card.sustained_flops_per_s <= card.flops_per_s for card in PRESETS.values())


def test_products_of_half_width_have_a_rate_of_their_own() -> None:
    said = one('"preset": "a100-80"').half_flops_per_s
    assert said == PRESETS["a100-80"].sustained_half_flops_per_s
    assert said is not None
    assert 0.5 * 312e12 < said < 312e12
    assert one('"preset": "a100-80", "half_flops": "250TFLOP/s"').half_flops_per_s == 250e12
    assert one('"preset": "a100-80", "flops": "15TFLOP/s"').half_flops_per_s is None
    mine = '"kind": "cpu", "memory": "1GiB", "flops": "1GFLOP/s", "memory_bandwidth": "1GB/s"'
    assert one(mine).half_flops_per_s is None
    assert one(f'{mine}, "half_flops": "2GFLOP/s"').half_flops_per_s == 2e9


def test_tf32_is_the_presets_and_asked_for() -> None:
    plain = one('"preset": "a100-80"')
    assert plain.tf32_flops_per_s == PRESETS["a100-80"].sustained_tf32_flops_per_s
    assert plain.matmul_precision == "highest"
    asked = one('"preset": "a100-80", "matmul_precision": "high", "tf32_flops": "99TFLOP/s"')
    assert (asked.tf32_flops_per_s, asked.matmul_precision) == (99e12, "high")
    again = parse_cluster(to_json(Cluster((asked,), Link(0.0, 1e9))), "x").devices
    assert again == (asked,)
    assert one('"preset": "v100-16"').tf32_flops_per_s is None


def test_cards_of_one_host_are_linked_as_their_datasheets_say() -> None:
    def link(*presets: str, links: str = "") -> Link:
        devices = ", ".join(f'{{"name": "d{i}", "preset": "{p}"}}' for i, p in enumerate(presets))
        return parse(f'{{"devices": [{devices}]{links}}}').link("d0", "d1")

    nvlink, pcie = link("a100-80", "a100-80"), link("a100-80", "l4")
    assert nvlink.bytes_per_s > 200e9
    assert pcie == link("l4", "l4") != nvlink
    said = link("l4", "l4", links=f', "links": {{"same_host": {{{LINK}}}}}')
    assert said == Link(50e-6, 1e9)
    between_hosts = link("a100-80", "a100-80", links=f', "links": {{"default": {{{LINK}}}}}')
    assert between_hosts == nvlink


def test_a_cluster_whose_cards_have_the_default_link_is_written_so() -> None:
    cards = [replace(one('"preset": "l4"'), name=name) for name in ("d0", "d1")]
    cluster = Cluster(tuple(cards), Link(1e-3, 1e9))
    again = parse_cluster(to_json(cluster), "x")
    assert again.link("d0", "d1") == cluster.link("d0", "d1") == Link(1e-3, 1e9)


def test_cublas_workspace_is_the_presets_or_as_written() -> None:
    assert one('"preset": "h200"').blas_bytes == 32 * 2**20
    assert one('"preset": "l4"').blas_bytes == 8320 * 2**10
    written = one('"preset": "l4", "blas_workspace": "12MiB"')
    assert written.blas_bytes == 12 * 2**20
    mine = '"kind": "cuda", "memory": "1GiB", "flops": "1GFLOP/s", "memory_bandwidth": "1GB/s"'
    assert one(mine).blas_bytes is None
    for device in (written, one('"preset": "l4"'), one(mine)):
        cluster = Cluster((device,), Link(0.0, 1e9))
        assert parse_cluster(to_json(cluster), "x").devices == (device,)


def test_torch_chooses_a_workspace_by_the_capability() -> None:
    larger = {major for major in range(5, 14) if blas_bytes((major, 0)) == 32 * 2**20}
    assert larger == {9, 10, 12}
    assert blas_bytes((8, 9)) == blas_bytes((11, 0)) == 8320 * 2**10


def test_schema_and_comments_are_ignored() -> None:
    text = f"""{{"$schema": "cluster.schema.json", "$comment": "x",
        "devices": [{{"$comment": "y", "name": "d0", {CPU}}}],
        "links": {{"$comment": "z", "default": {{{LINK}}}}}}}"""
    assert len(parse(text).devices) == 1


@pytest.mark.parametrize("host", ["node-1.lab", "10.0.0.7", "::1", "fe80::1", "localhost", "N1"])
def test_hosts_that_are_fine(host: str) -> None:
    assert one(f'"host": "{host}", {CPU}').host == host


# --------------------------------------------------------------------------- links


def cluster_of(links: str) -> Cluster:
    """Make d0 and d1 on host a, d2 and d3 on host b."""
    devices = ", ".join(
        f'{{"name": "d{i}", "host": "{host}", {CPU}}}' for i, host in enumerate("aabb")
    )
    return parse(f'{{"devices": [{devices}]{links}}}')


def speeds(cluster: Cluster) -> list[float]:
    """Return GB/s of d0-d1, d0-d2, d0-d3, d1-d2, d1-d3, d2-d3."""
    pairs = ["d0 d1", "d0 d2", "d0 d3", "d1 d2", "d1 d3", "d2 d3"]
    links = [cluster.link(*pair.split()) for pair in pairs]
    assert links == [cluster.link(*reversed(pair.split())) for pair in pairs]
    return [link.bytes_per_s / 1e9 for link in links]


def entry(ends: str, speed: int) -> str:
    return f'{{{ends}, "bandwidth": "{speed}GB/s", "latency": "1us"}}'


SAME_HOST = entry('"$comment": "x"', 8)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("", [1.0, 0.125, 0.125, 0.125, 0.125, 1.0]),  # slow Ethernet and loopback
        (', "links": {}', [1.0, 0.125, 0.125, 0.125, 0.125, 1.0]),
        (f', "links": {{"default": {{{LINK}}}}}', [1.0] * 6),  # inside a host, too
        (
            f', "links": {{"default": {{{LINK}}}, "same_host": {SAME_HOST}}}',
            [8.0, 1.0, 1.0, 1.0, 1.0, 8.0],
        ),
    ],
)
def test_links_within_hosts_and_between_them(links: str, expected: list[float]) -> None:
    assert speeds(cluster_of(links)) == expected


def test_devices_win_over_hosts_and_hosts_over_same_host() -> None:
    between = ", ".join(
        [
            entry('"hosts": ["b", "a"]', 2),
            entry('"devices": ["d3", "d0"]', 3),
            entry('"hosts": ["a", "a"]', 4),
        ]
    )
    links = f', "links": {{"same_host": {SAME_HOST}, "between": [{between}]}}'
    assert speeds(cluster_of(links)) == [4.0, 2.0, 3.0, 2.0, 2.0, 8.0]


# --------------------------------------------------------------------------- and back

_names = st.text(string.ascii_letters + string.digits, min_size=1, max_size=8)
_rates = st.floats(min_value=1e-3, max_value=1e18)
_times = st.floats(min_value=0.0, max_value=1e3)
_link_values = st.builds(Link, _times, _rates)
_overheads = st.builds(Overheads, _times, st.none() | _rates, _times, _times, st.booleans())


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(_names, min_size=1, max_size=5, unique_by=str.casefold))
    devices = tuple(
        Device(
            name,
            draw(st.sampled_from(["a", "b", "10.0.0.1"])),
            draw(st.sampled_from(["cpu", "cuda"])),
            draw(st.integers(1, 2**45)),
            draw(_rates),
            draw(_rates),
            draw(st.floats(min_value=0.0, max_value=1.0)),
            draw(st.integers(1, 64)),
            draw(_overheads),
            draw(st.none() | _rates),
        )
        for name in names
    )
    shared = draw(st.lists(st.sampled_from([d.host for d in devices]), unique=True))
    hosts = tuple(Host(name, draw(st.none() | _rates)) for name in shared)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    linked = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = tuple((a, b, draw(_link_values)) for a, b in linked)
    return Cluster(devices, draw(_link_values), links, hosts)


@settings(max_examples=examples(60), deadline=None)
@given(_clusters())
def test_writing_and_reading_gives_the_same_cluster(cluster: Cluster) -> None:
    assert parse(to_json(cluster)) == cluster


def test_written_files_read_well() -> None:
    rates = '"h200", "flops": "50TFLOP/s", "memory_bandwidth": "4TB/s"'
    text = to_json(parse(ISSUE.replace('"h200"', rates)))
    found = re.findall(
        r'"(?:memory|flops|memory_bandwidth|launch|bandwidth|latency)": "(.*)"', text
    )
    first = ["4GiB", "60GFLOP/s", "12GB/s", "5us"]
    second = ["141GB", "50TFLOP/s", "4TB/s", "10.5us"]
    assert found == [*first, *second, "1GB/s", "50us", "1.25GB/s", "100us"]
    assert parse(to_json(cluster_of(""))) == cluster_of("")


def test_values_without_text_are_refused() -> None:
    with refused("BX1046"):
        to_json(Cluster(parse(ISSUE).devices, Link(0.0, float("inf"))))


# --------------------------------------------------------------------------- schema


def _properties(node: Any) -> dict[str, Any]:
    return dict(node["properties"])


def test_schema_describes_every_field() -> None:
    described = schema()
    assert described["$schema"].startswith("https://json-schema.org/")
    assert described["required"] == ["devices"]
    top = "$schema $comment devices links hosts stores zones replicas"
    assert set(_properties(described)) == set(top.split())
    device = described["$defs"]["DeviceEntry"]
    fields = (
        "name host kind preset memory flops half_flops tf32_flops matmul_precision "
        "memory_bandwidth process_memory blas_workspace launch threads processor kernels overheads "
        "price_per_hour_usd"
    )
    assert set(_properties(device)) == {*fields.split(), "$comment"}
    assert device["required"] == ["name"]
    objects = [described, *described["$defs"].values()]
    assert all(node["additionalProperties"] is False for node in objects)
    assert "null" not in json.dumps(described)
    json.dumps(described, allow_nan=False)


def test_patterns_of_the_schema_accept_what_the_reader_accepts() -> None:
    properties = _properties(schema()["$defs"]["DeviceEntry"])
    for field, good, bad in [
        ("memory", ["24GiB", "1.5 GB", "7B"], ["24", "GiB", "-1GiB", "24gib"]),
        ("flops", ["312TFLOP/s"], ["312TFLOPS/s", "312"]),
        ("memory_bandwidth", ["10Gbit/s", "1GB/s"], ["10Gb/s", "1GB"]),
        ("launch", ["0us", "0.2ms"], ["5"]),
        ("name", ["d0", "gpu-0.a"], ["-d", "a b", "a;b"]),
    ]:
        pattern = re.compile(properties[field]["pattern"])
        assert all(pattern.search(text) for text in good)
        assert not any(pattern.search(text) for text in bad)
        assert all(pattern.search(text) for text in properties[field].get("examples", []))


def test_the_room_imports_no_torch() -> None:
    folder = Path(str(room.__file__)).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("torch") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("torch")


# --------------------------------------------------------------------------- hosts, overheads

TWO_HOSTS = f"""{{
  "devices": [
    {{"name": "a0", "host": "a", {CPU}}},
    {{"name": "a1", "host": "a", {CPU.replace("12GB/s", "36GB/s")}}},
    {{"name": "b0", "host": "b", {CPU}}}
  ],
  "hosts": HOSTS
}}"""


def test_devices_share_the_nic_of_their_host() -> None:
    hosts = '[{"name": "a", "nic": "1Gbit/s"}]'
    found = parse(TWO_HOSTS.replace("HOSTS", hosts))
    assert found.hosts == (Host("a", nic_bytes_per_s=125e6),)
    assert found.nics("a0", "b0") == (("out of a", 125e6),)
    assert found.nics("b0", "a1") == (("into a", 125e6),)
    assert found.nics("a0", "a1") == ()
    assert [d.memory_bytes_per_s for d in found.devices] == [12e9, 36e9, 12e9]


def test_devices_keep_their_own_rates_where_hosts_share_memory_and_cores() -> None:
    hosts = '[{"name": "a", "memory_bandwidth": "16GB/s", "cores": 2}, {"name": "b", "cores": 1}]'
    found = parse(TWO_HOSTS.replace("HOSTS", hosts))
    assert [d.memory_bytes_per_s for d in found.devices] == [12e9, 36e9, 12e9]
    assert found.hosts == (Host("a", None, 16e9, 2), Host("b", cores=1))
    assert parse(to_json(found)) == found


@pytest.mark.parametrize(
    ("hosts", "code", "at"),
    [
        ('[{"name": "c"}]', "BX1039", "hosts[0].name"),
        ('[{"name": "a"}, {"name": "a"}]', "BX1040", "hosts[1].name"),
        ('[{"name": "a", "nic": "10Gb/s"}]', "BX1030", "hosts[0].nic"),
        ('[{"name": "a", "cores": 0}]', "BX1020", "hosts[0].cores"),
    ],
)
def test_hosts_that_are_not_right(hosts: str, code: str, at: str) -> None:
    with refused(code) as caught:
        parse(TWO_HOSTS.replace("HOSTS", hosts))
    assert at in str(caught.value.at)


def test_overheads_are_none_unless_written() -> None:
    assert one(CPU).overheads == Overheads()
    given = '"overheads": {"message": "20us", "message_bandwidth": "2GB/s", "step": "1ms"}'
    assert one(f"{CPU}, {given}").overheads == Overheads(20e-6, 2e9, 0.0, 1e-3)
    assert one(f"{CPU}, {given}").overheads.handling_s(1_000_000) == pytest.approx(520e-6)
