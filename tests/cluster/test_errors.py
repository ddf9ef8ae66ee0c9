"""What each mistake in a cluster.json is told: the fault, the place, the cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.cluster import parse_cluster, read_cluster
from bigbrain_fx.cluster.faults import _ENTRIES
from bigbrain_fx.cluster.file import StrictModel
from bigbrain_fx.errors import InputError
from tests.support.messages import refused

CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'
LINK = '"bandwidth": "1GB/s", "latency": "50us"'


def error_of(text: str, code: str) -> InputError:
    with refused(code) as caught:
        parse_cluster(text, "cluster.json")
    assert caught.value.exit_code == 2
    return caught.value


D0 = f'{{"name": "d0", {CPU}}}'

D0_PLAIN_MEMORY = D0.replace('"4GiB"', "24")
D0_PLAIN_RATE = D0.replace('"60GFLOP/s"', "6e10")
D0_NULL = D0.replace('"4GiB"', "null")

BAD: dict[str, tuple[str, str, str]] = {
    # what it is: text, code, exact place
    "not JSON": ('{"devices" 1}', "BX1013", "cluster.json:1:12"),
    "empty": (" \n", "BX1009", "cluster.json:2:1"),
    "comma in a list": (
        f'{{"devices": [\n{D0},\n]}}',
        "BX1010",
        f"cluster.json:2:{len(D0) + 1}",
    ),
    "comma in an object": (
        '{"devices": 1,}',
        "BX1010",
        "cluster.json:1:14",
    ),
    "comment": ("// mine\n{}", "BX1011", "cluster.json:1:1"),
    "single quotes": ("{'devices': []}", "BX1012", "cluster.json:1:2"),
    "NaN": (
        '{"devices":\n [{"threads": NaN}]}',
        "BX1006",
        "cluster.json:2: devices[0].threads",
    ),
    "Infinity": (
        '{"links": {"default": {"bandwidth": -Infinity}}}',
        "BX1006",
        "cluster.json:1: links.default.bandwidth",
    ),
    "duplicate key": (
        '{"devices": [{"name": "a",\n\n "name": "b"}]}',
        "BX1005",
        "cluster.json:3: devices[0].name",
    ),
    "too deep": ("[" * 100_000, "BX1007", "cluster.json"),
    "too many digits": (f'{{"a": {"1" * 5000}}}', "BX1008", "cluster.json"),
    "too long": (f'{{"a": "{"x" * 1_000_000}"}}', "BX1004", "cluster.json"),
    "not an object": (
        "[1]",
        "BX1021",
        "cluster.json:1",
    ),
    "no devices field": (
        "{}",
        "BX1014",
        "cluster.json:1: devices",
    ),
    "0 devices": (
        '{\n"devices": []}',
        "BX1017",
        "cluster.json:2: devices",
    ),
    "devices no list": (
        '{"devices": "d0"}',
        "BX1021",
        "cluster.json:1: devices",
    ),
    "unknown field": (
        f'{{"devices": [{D0},\n{{"name": "d1", {CPU},\n"memory_bandwith": "1GB/s"}}]}}',
        "BX1015",
        "cluster.json:3: devices[1].memory_bandwith",
    ),
    "unknown field at the top": (
        f'{{"devices": [{D0}], "link": {{}}}}',
        "BX1015",
        "cluster.json:1: link",
    ),
    "unknown field of a host": (
        f'{{"devices": [{D0}], "hosts": [{{"name": "localhost", "core": 2}}]}}',
        "BX1015",
        "cluster.json:1: hosts[0].core",
    ),
    "unknown field of overheads": (
        f'{{"devices": [{{"name": "d0", {CPU}, "overheads": {{"steps": "1ms"}}}}]}}',
        "BX1015",
        "cluster.json:1: devices[0].overheads.steps",
    ),
    "a host without cores": (
        f'{{"devices": [{D0}], "hosts": [{{"name": "localhost", "cores": 0}}]}}',
        "BX1020",
        "cluster.json:1: hosts[0].cores",
    ),
    "unknown field of a link": (
        f'{{"devices": [{D0}], "links": {{"default": {{{LINK}, "speed": "1GB/s"}}}}}}',
        "BX1015",
        "cluster.json:1: links.default.speed",
    ),
    "escape sequence in a field": (
        f'{{"devices": [{D0}], "\\u001b[2J": 1}}',
        "BX1015",
        'cluster.json:1: ["\\x1b[2J"]',
    ),
    "plain number": (
        f'{{"devices": [{D0_PLAIN_MEMORY}]}}',
        "BX1029",
        "cluster.json:1: devices[0].memory",
    ),
    "plain rate": (
        f'{{"devices": [{D0_PLAIN_RATE}]}}',
        "BX1029",
        "cluster.json:1: devices[0].flops",
    ),
    "unit in the wrong case": (
        f'{{"devices": [{D0.replace("4GiB", "4gib")}]}}',
        "BX1030",
        "cluster.json:1: devices[0].memory",
    ),
    "unit of something else": (
        f'{{"devices": [{D0.replace("12GB/s", "12GB")}]}}',
        "BX1030",
        "cluster.json:1: devices[0].memory_bandwidth",
    ),
    "negative memory": (
        f'{{"devices": [{D0.replace("4GiB", "-4GiB")}]}}',
        "BX1031",
        "cluster.json:1: devices[0].memory",
    ),
    "zero memory": (
        f'{{"devices": [{D0.replace("4GiB", "0.0GiB")}]}}',
        "BX1032",
        "cluster.json:1: devices[0].memory",
    ),
    "less than a byte": (
        f'{{"devices": [{D0.replace("4GiB", "0.1B")}]}}',
        "BX1034",
        "cluster.json:1: devices[0].memory",
    ),
    "absurd rate": (
        f'{{"devices": [{D0.replace("60GFLOP", "9" * 40 + "GFLOP")}]}}',
        "BX1033",
        "cluster.json:1: devices[0].flops",
    ),
    "null": (
        f'{{"devices": [{D0_NULL}]}}',
        "BX1029",
        "cluster.json:1: devices[0].memory",
    ),
    "no threads": (
        f'{{"devices": [{{"name": "d0", "threads": 0, {CPU}}}]}}',
        "BX1020",
        "cluster.json:1: devices[0].threads",
    ),
    "threads true": (
        f'{{"devices": [{{"name": "d0", "threads": true, {CPU}}}]}}',
        "BX1021",
        "cluster.json:1: devices[0].threads",
    ),
    "unknown precision of products": (
        '{"devices": [{"name": "d0", "preset": "t4", "matmul_precision": "tf32"}]}',
        "BX1016",
        "cluster.json:1: devices[0].matmul_precision",
    ),
    "unknown kind": (
        f'{{"devices": [{D0.replace("cpu", "tpu")}]}}',
        "BX1016",
        "cluster.json:1: devices[0].kind",
    ),
    "unknown preset": (
        '{"devices": [{"name": "d0", "preset": "a100"}]}',
        "BX1026",
        "cluster.json:1: devices[0].preset",
    ),
    "preset of a cpu": (
        '{"devices": [{"name": "d0", "kind": "cpu", "preset": "t4"}]}',
        "BX1036",
        "cluster.json:1: devices[0].kind",
    ),
    "no flops and no preset": (
        '{"devices": [{"name": "d0", "kind": "cpu", "memory": "4GiB"}]}',
        "BX1037",
        "cluster.json:1: devices[0].flops",
    ),
    "no name": (
        f'{{"devices": [{{{CPU}}}]}}',
        "BX1014",
        "cluster.json:1: devices[0].name",
    ),
    "duplicate name": (
        f'{{"devices": [{D0},\n{D0}]}}',
        "BX1038",
        "cluster.json:2: devices[1].name",
    ),
    "name in another case": (
        f'{{"devices": [{D0},\n{D0.replace("d0", "D0")}]}}',
        "BX1038",
        "cluster.json:2: devices[1].name",
    ),
    "link to an unknown device": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "do"], {LINK}}}]}}}}',
        "BX1000",
        "cluster.json:1: links.between[0].devices[1]",
    ),
    "link to an unknown host": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"hosts": ["b", "localhost"], {LINK}}}]}}}}',
        "BX1000",
        "cluster.json:1: links.between[0].hosts[0]",
    ),
    "link of one device": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0"], {LINK}}}]}}}}',
        "BX1018",
        "cluster.json:1: links.between[0].devices",
    ),
    "link to itself": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "d0"], {LINK}}}]}}}}',
        "BX1043",
        "cluster.json:1: links.between[0].devices",
    ),
    "link of nothing": (
        f'{{"devices": [{D0}], "links": {{"between": [{{{LINK}}}]}}}}',
        "BX1042",
        "cluster.json:1: links.between[0]",
    ),
    "link of both": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "d1"], '
        f'"hosts": ["a", "b"], {LINK}}}]}}}}',
        "BX1042",
        "cluster.json:1: links.between[0]",
    ),
    "same link twice": (
        f'{{"devices": [{D0}, {D0.replace("d0", "d1")}], "links": {{"between": '
        f'[{{"devices": ["d0", "d1"], {LINK}}},\n{{"devices": ["d1", "d0"], {LINK}}}]}}}}',
        "BX1041",
        "cluster.json:2: links.between[1].devices",
    ),
    "no latency": (
        f'{{"devices": [{D0}], "links": {{"default": {{"bandwidth": "1GB/s"}}}}}}',
        "BX1014",
        "cluster.json:1: links.default.latency",
    ),
    "too many devices": (
        json.dumps({"devices": [{"name": f"d{i}", "preset": "t4"} for i in range(4097)]}),
        "BX1019",
        "cluster.json:1: devices",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str) -> None:
    text, code, at = BAD[case]
    assert error_of(text, code).at == at


@pytest.mark.parametrize(
    "name", ["d0; rm -rf ~", "$(id)", "a b", "-d", "../d", "a/b", "d\n", "", "é"]
)
def test_device_names_are_safe(name: str) -> None:
    text = f'{{"devices": [{{"name": {json.dumps(name)}, {CPU}}}]}}'
    assert error_of(text, "BX1023").at == "cluster.json:1: devices[0].name"


@pytest.mark.parametrize(
    "host",
    [
        "a;b",
        "-oProxyCommand=x",
        "user@host",
        "a b",
        "host:29500",
        "`id`",
        "a|b",
        "a\n",
        "[::1]",
        "x$y",
    ],
)
def test_host_names_are_safe(host: str) -> None:
    text = f'{{"devices": [{{"name": "d0", "host": {json.dumps(host)}, {CPU}}}]}}'
    assert error_of(text, "BX1024").at == "cluster.json:1: devices[0].host"


def test_the_first_fault_of_the_file_is_the_error_and_the_others_are_notes() -> None:
    text = """{"devices": [
      {"name": "d0", "preset": "t4", "memory": 3},
      {"name": "d1", "preset": "t4", "threads": 0},
      {"name": "d2", "preset": "t4", "colour": 1}]}"""
    error = error_of(text, "BX1029")
    assert error.at == "cluster.json:2: devices[0].memory"
    assert [note.partition(": ")[0] for note in error.notes] == [
        "also cluster.json:3",
        "also cluster.json:4",
    ]


def test_a_long_value_is_cut_and_escaped() -> None:
    text = f'{{"devices": [{{"name": "d0", "preset": "\\u001b{"x" * 10_000}"}}]}}'
    error = error_of(text, "BX1028")
    assert len(error.what) < 120
    assert "\x1b" not in str(error)


# --------------------------------------------------------------------------- files


def test_a_fault_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"devices": []}', encoding="utf-8")
    with refused("BX1017") as caught:
        read_cluster(path)
    assert caught.value.at == f"{path}:1: devices"


@pytest.mark.parametrize(
    ("content", "code", "suffix"),
    [
        (None, "BX1001", ""),
        (b" " * 1_000_001, "BX1002", ""),
        (b'{\n"devices": "\xff"}', "BX1003", ":2"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, code: str, suffix: str) -> None:
    path = tmp_path / "cluster.json"
    if content is not None:
        path.write_bytes(content)
    with refused(code) as caught:
        read_cluster(path)
    assert caught.value.at == f"{path}{suffix}"
    assert caught.value.exit_code == 2


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with refused("BX1001"):
        read_cluster(tmp_path)


def test_every_object_of_the_file_can_say_what_it_may_hold() -> None:
    def below(kind: type[StrictModel]) -> set[type[StrictModel]]:
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    assert below(StrictModel) - {StrictModel} == set(_ENTRIES.values())


def test_other_unknown_fields_are_told_what_may_be_meant() -> None:
    text = f'{{"devices": [{D0}], "link": {{{LINK}}}, "junk": 1, "store": []}}'
    assert len(error_of(text, "BX1015").notes) == 2
