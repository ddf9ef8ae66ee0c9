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

USUAL = {"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"}
WIRE = {"bandwidth": "1GB/s", "latency": "50us"}


def error_of(text: str, code: str) -> InputError:
    with refused(code) as caught:
        parse_cluster(text, "cluster.json")
    assert caught.value.exit_code == 2
    return caught.value


def device(name: str = "d0", **more: object) -> dict[str, object]:
    return {"name": name, **USUAL, **more}


def written(*devices: object, **more: object) -> str:
    """Write a file of these devices, a line each."""
    each = ",\n".join(map(json.dumps, devices))
    rest = json.dumps(more).removeprefix("{")
    return f'{{"devices": [{each}]{", " if more else ""}{rest}'


def between(*links: dict[str, object]) -> str:
    """Write a file of two devices and these links, each with a rate and a latency."""
    pairs = [{**ends, **WIRE} for ends in links]
    return written(device(), device("d1"), links={"between": pairs})


BAD: dict[str, tuple[str, str, str]] = {
    # what it is: text, code, place after "cluster.json"
    "not JSON": ('{"devices" 1}', "BX1013", ":1:12"),
    "empty": (" \n", "BX1009", ":2:1"),
    "comma in a list": ('{"devices": [\n{},\n]}', "BX1010", ":2:3"),
    "comma in an object": ('{"devices": 1,}', "BX1010", ":1:14"),
    "comment": ("// mine\n{}", "BX1011", ":1:1"),
    "single quotes": ("{'devices': []}", "BX1012", ":1:2"),
    "NaN": ('{"devices":\n [{"threads": NaN}]}', "BX1006", ":2: devices[0].threads"),
    "Infinity": ('{"links": {"default": -Infinity}}', "BX1006", ":1: links.default"),
    "duplicate key": ('{"devices": [{"a": 1,\n\n "a": 2}]}', "BX1005", ":3: devices[0].a"),
    "too deep": ("[" * 100_000, "BX1007", ""),
    "too many digits": (f'{{"a": {"1" * 5000}}}', "BX1008", ""),
    "too long": (f'{{"a": "{"x" * 1_000_000}"}}', "BX1004", ""),
    "not an object": ("[1]", "BX1021", ":1"),
    "no devices field": ("{}", "BX1014", ":1: devices"),
    "0 devices": ('{\n"devices": []}', "BX1017", ":2: devices"),
    "devices no list": ('{"devices": "d0"}', "BX1021", ":1: devices"),
    "unknown field": (
        written(device(), device("d1", memory_bandwith="1GB/s")),
        "BX1015",
        ":2: devices[1].memory_bandwith",
    ),
    "unknown field at the top": (written(device(), link={}), "BX1015", ":1: link"),
    "unknown field of a host": (
        written(device(), hosts=[{"name": "localhost", "core": 2}]),
        "BX1015",
        ":1: hosts[0].core",
    ),
    "unknown field of overheads": (
        written(device(overheads={"steps": "1ms"})),
        "BX1015",
        ":1: devices[0].overheads.steps",
    ),
    "a host without cores": (
        written(device(), hosts=[{"name": "localhost", "cores": 0}]),
        "BX1020",
        ":1: hosts[0].cores",
    ),
    "unknown field of a link": (
        written(device(), links={"default": {**WIRE, "speed": "1GB/s"}}),
        "BX1015",
        ":1: links.default.speed",
    ),
    "escape sequence in a field": (
        written(device(), **{"\x1b[2J": 1}),
        "BX1015",
        ':1: ["\\x1b[2J"]',
    ),
    "unknown preset": (
        written({"name": "d0", "preset": "a100"}),
        "BX1026",
        ":1: devices[0].preset",
    ),
    "preset of a cpu": (
        written({"name": "d0", "kind": "cpu", "preset": "t4"}),
        "BX1036",
        ":1: devices[0].kind",
    ),
    "no flops and no preset": (
        written({"name": "d0", "kind": "cpu", "memory": "4GiB"}),
        "BX1037",
        ":1: devices[0].flops",
    ),
    "no name": (written(USUAL), "BX1014", ":1: devices[0].name"),
    "duplicate name": (written(device(), device()), "BX1038", ":2: devices[1].name"),
    "name in another case": (written(device(), device("D0")), "BX1038", ":2: devices[1].name"),
    "link to an unknown device": (
        between({"devices": ["d0", "do"]}),
        "BX1000",
        ":2: links.between[0].devices[1]",
    ),
    "link to an unknown host": (
        between({"hosts": ["b", "localhost"]}),
        "BX1000",
        ":2: links.between[0].hosts[0]",
    ),
    "link of one device": (
        between({"devices": ["d0"]}),
        "BX1018",
        ":2: links.between[0].devices",
    ),
    "link to itself": (
        between({"devices": ["d0", "d0"]}),
        "BX1043",
        ":2: links.between[0].devices",
    ),
    "link of nothing": (between({}), "BX1042", ":2: links.between[0]"),
    "link of both": (
        between({"devices": ["d0", "d1"], "hosts": ["a", "b"]}),
        "BX1042",
        ":2: links.between[0]",
    ),
    "same link twice": (
        between({"devices": ["d0", "d1"]}, {"devices": ["d1", "d0"]}),
        "BX1041",
        ":2: links.between[1].devices",
    ),
    "no latency": (
        written(device(), links={"default": {"bandwidth": "1GB/s"}}),
        "BX1014",
        ":1: links.default.latency",
    ),
    "too many devices": (
        written(*({"name": f"d{i}", "preset": "t4"} for i in range(4097))),
        "BX1019",
        ":1: devices",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str) -> None:
    text, code, at = BAD[case]
    assert error_of(text, code).at == f"cluster.json{at}"


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("memory", 24, "BX1029"),
        ("flops", 6e10, "BX1029"),
        ("memory", None, "BX1029"),
        ("memory", "4gib", "BX1030"),
        ("memory_bandwidth", "12GB", "BX1030"),
        ("memory", "-4GiB", "BX1031"),
        ("memory", "0.0GiB", "BX1032"),
        ("memory", "0.1B", "BX1034"),
        ("flops", "9" * 40 + "GFLOP/s", "BX1033"),
        ("threads", 0, "BX1020"),
        ("threads", True, "BX1021"),
        ("matmul_precision", "tf32", "BX1016"),
        ("kind", "tpu", "BX1016"),
    ],
)
def test_a_value_that_cannot_be(field: str, value: object, code: str) -> None:
    error = error_of(written({**device(), field: value}), code)
    assert error.at == f"cluster.json:1: devices[0].{field}"


@pytest.mark.parametrize(
    "name", ["d0; rm -rf ~", "$(id)", "a b", "-d", "../d", "a/b", "d\n", "", "é"]
)
def test_device_names_are_safe(name: str) -> None:
    assert error_of(written(device(name)), "BX1023").at == "cluster.json:1: devices[0].name"


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
    assert error_of(written(device(host=host)), "BX1024").at == "cluster.json:1: devices[0].host"


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
    text = written(device(), link=WIRE, junk=1, store=[])
    assert len(error_of(text, "BX1015").notes) == 2
