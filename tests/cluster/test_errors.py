"""What each mistake in a cluster.json is told: the fault, the place, the cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.cluster import parse_cluster, read_cluster
from bigbrain_fx.cluster.faults import _ENTRIES
from bigbrain_fx.cluster.file import StrictModel
from bigbrain_fx.errors import InputError

CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'
LINK = '"bandwidth": "1GB/s", "latency": "50us"'


def error_of(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_cluster(text, "cluster.json")
    assert caught.value.exit_code == 2
    return caught.value


D0 = f'{{"name": "d0", {CPU}}}'

D0_PLAIN_MEMORY = D0.replace('"4GiB"', "24")
D0_PLAIN_RATE = D0.replace('"60GFLOP/s"', "6e10")
D0_NULL = D0.replace('"4GiB"', "null")

BAD: dict[str, tuple[str, str, str, str]] = {
    # what it is: text, part of the message, exact place, part of the help
    "not JSON": ('{"devices" 1}', "not JSON", "cluster.json:1:12", "mend the text"),
    "empty": (" \n", "the file is empty", "cluster.json:2:1", "bigbrain-fx init"),
    "comma in a list": (
        f'{{"devices": [\n{D0},\n]}}',
        "a comma before the closing ]",
        f"cluster.json:2:{len(D0) + 1}",
        "delete the comma",
    ),
    "comma in an object": (
        '{"devices": 1,}',
        "a comma before the closing }",
        "cluster.json:1:14",
        "delete the comma",
    ),
    "comment": ("// mine\n{}", "JSON has no comments", "cluster.json:1:1", "$comment"),
    "single quotes": ("{'devices': []}", "a single quote", "cluster.json:1:2", "double quotes"),
    "NaN": (
        '{"devices":\n [{"threads": NaN}]}',
        "devices[0].threads: NaN is not JSON",
        "cluster.json:2: devices[0].threads",
        "finite",
    ),
    "Infinity": (
        '{"links": {"default": {"bandwidth": -Infinity}}}',
        "links.default.bandwidth: -Infinity is not JSON",
        "cluster.json:1: links.default.bandwidth",
        "finite",
    ),
    "duplicate key": (
        '{"devices": [{"name": "a",\n\n "name": "b"}]}',
        'devices[0].name: the key "name" is here twice; it is also on line 1',
        "cluster.json:3: devices[0].name",
        "keep one",
    ),
    "too deep": ("[" * 100_000, "nested too deeply", "cluster.json", "five levels"),
    "too many digits": (f'{{"a": {"1" * 5000}}}', "too many digits", "cluster.json", "shorten"),
    "too long": (f'{{"a": "{"x" * 1_000_000}"}}', "1,000,000", "cluster.json", "kilobytes"),
    "not an object": (
        "[1]",
        "expected an object { ... }, found a list",
        "cluster.json:1",
        "schema",
    ),
    "no devices field": (
        "{}",
        "devices: this field is missing",
        "cluster.json:1: devices",
        "preset",
    ),
    "0 devices": (
        '{\n"devices": []}',
        "devices: the cluster has no devices",
        "cluster.json:2: devices",
        "add one",
    ),
    "devices no list": (
        '{"devices": "d0"}',
        'devices: expected a list [ ... ], found "d0"',
        "cluster.json:1: devices",
        "schema",
    ),
    "unknown field": (
        f'{{"devices": [{D0},\n{{"name": "d1", {CPU},\n"memory_bandwith": "1GB/s"}}]}}',
        'devices[1].memory_bandwith: unknown field "memory_bandwith"',
        "cluster.json:3: devices[1].memory_bandwith",
        'did you mean "memory_bandwidth"?',
    ),
    "unknown field at the top": (
        f'{{"devices": [{D0}], "link": {{}}}}',
        'link: unknown field "link"',
        "cluster.json:1: link",
        'did you mean "links"?',
    ),
    "unknown field of a host": (
        f'{{"devices": [{D0}], "hosts": [{{"name": "localhost", "core": 2}}]}}',
        'hosts[0].core: unknown field "core"',
        "cluster.json:1: hosts[0].core",
        'did you mean "cores"?',
    ),
    "unknown field of overheads": (
        f'{{"devices": [{{"name": "d0", {CPU}, "overheads": {{"steps": "1ms"}}}}]}}',
        'devices[0].overheads.steps: unknown field "steps"',
        "cluster.json:1: devices[0].overheads.steps",
        'did you mean "step"?',
    ),
    "a host without cores": (
        f'{{"devices": [{D0}], "hosts": [{{"name": "localhost", "cores": 0}}]}}',
        "hosts[0].cores: expected 1 to 4096, found 0",
        "cluster.json:1: hosts[0].cores",
        'for example "cores": 1',
    ),
    "unknown field of a link": (
        f'{{"devices": [{D0}], "links": {{"default": {{{LINK}, "speed": "1GB/s"}}}}}}',
        'links.default.speed: unknown field "speed"',
        "cluster.json:1: links.default.speed",
        "known here: bandwidth, latency",
    ),
    "escape sequence in a field": (
        f'{{"devices": [{D0}], "\\u001b[2J": 1}}',
        '["\\x1b[2J"]: unknown field "\\x1b[2J"',
        'cluster.json:1: ["\\x1b[2J"]',
        "known here: devices, links",
    ),
    "plain number": (
        f'{{"devices": [{D0_PLAIN_MEMORY}]}}',
        "devices[0].memory: expected an amount of memory with its unit, found the plain number 24",
        "cluster.json:1: devices[0].memory",
        'write the unit: "24GiB"',
    ),
    "plain rate": (
        f'{{"devices": [{D0_PLAIN_RATE}]}}',
        "devices[0].flops: expected a compute rate with its unit",
        "cluster.json:1: devices[0].flops",
        'for example "60GFLOP/s"',
    ),
    "unit in the wrong case": (
        f'{{"devices": [{D0.replace("4GiB", "4gib")}]}}',
        'devices[0].memory: expected an amount of memory, found "4gib"',
        "cluster.json:1: devices[0].memory",
        "did you mean GiB?",
    ),
    "unit of something else": (
        f'{{"devices": [{D0.replace("12GB/s", "12GB")}]}}',
        'devices[0].memory_bandwidth: expected a bandwidth, found "12GB"',
        "cluster.json:1: devices[0].memory_bandwidth",
        "did you mean GB/s?",
    ),
    "negative memory": (
        f'{{"devices": [{D0.replace("4GiB", "-4GiB")}]}}',
        'devices[0].memory: an amount of memory cannot be negative: "-4GiB"',
        "cluster.json:1: devices[0].memory",
        '"24GiB"',
    ),
    "zero memory": (
        f'{{"devices": [{D0.replace("4GiB", "0.0GiB")}]}}',
        'devices[0].memory: an amount of memory must be more than zero: "0.0GiB"',
        "cluster.json:1: devices[0].memory",
        '"24GiB"',
    ),
    "less than a byte": (
        f'{{"devices": [{D0.replace("4GiB", "0.1B")}]}}',
        "devices[0].memory: an amount of memory must be at least one byte",
        "cluster.json:1: devices[0].memory",
        '"24GiB"',
    ),
    "absurd rate": (
        f'{{"devices": [{D0.replace("60GFLOP", "9" * 40 + "GFLOP")}]}}',
        "devices[0].flops: a compute rate is too large to be true",
        "cluster.json:1: devices[0].flops",
        '"60GFLOP/s"',
    ),
    "null": (
        f'{{"devices": [{D0_NULL}]}}',
        "devices[0].memory: expected an amount of memory, found null",
        "cluster.json:1: devices[0].memory",
        '"24GiB"',
    ),
    "no threads": (
        f'{{"devices": [{{"name": "d0", "threads": 0, {CPU}}}]}}',
        "devices[0].threads: expected 1 to 4096, found 0",
        "cluster.json:1: devices[0].threads",
        '"threads": 1',
    ),
    "threads true": (
        f'{{"devices": [{{"name": "d0", "threads": true, {CPU}}}]}}',
        "devices[0].threads: expected a whole number, found true",
        "cluster.json:1: devices[0].threads",
        "schema",
    ),
    "unknown precision of products": (
        '{"devices": [{"name": "d0", "preset": "t4", "matmul_precision": "tf32"}]}',
        "devices[0].matmul_precision: expected 'highest', 'high' or 'medium', found \"tf32\"",
        "cluster.json:1: devices[0].matmul_precision",
        'write "highest", "high" or "medium"',
    ),
    "unknown kind": (
        f'{{"devices": [{D0.replace("cpu", "tpu")}]}}',
        "devices[0].kind: expected 'cpu' or 'cuda', found \"tpu\"",
        "cluster.json:1: devices[0].kind",
        '"cuda"',
    ),
    "unknown preset": (
        '{"devices": [{"name": "d0", "preset": "a100"}]}',
        'devices[0].preset: unknown preset "a100"',
        "cluster.json:1: devices[0].preset",
        "nearest: a100-",
    ),
    "preset of a cpu": (
        '{"devices": [{"name": "d0", "kind": "cpu", "preset": "t4"}]}',
        'devices[0].kind: the preset "t4" is a GPU, but kind is cpu',
        "cluster.json:1: devices[0].kind",
        'delete "kind"',
    ),
    "no flops and no preset": (
        '{"devices": [{"name": "d0", "kind": "cpu", "memory": "4GiB"}]}',
        'devices[0].flops: this field is missing, and device "d0" has no preset',
        "cluster.json:1: devices[0].flops",
        'add "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"',
    ),
    "no name": (
        f'{{"devices": [{{{CPU}}}]}}',
        "devices[0].name: this field is missing",
        "cluster.json:1: devices[0].name",
        'add "name": "d0"',
    ),
    "duplicate name": (
        f'{{"devices": [{D0},\n{D0}]}}',
        'devices[1].name: duplicate of devices[0].name: "d0"',
        "cluster.json:2: devices[1].name",
        "its own name",
    ),
    "name in another case": (
        f'{{"devices": [{D0},\n{D0.replace("d0", "D0")}]}}',
        'devices[1].name: "D0" differs from devices[0].name in case only',
        "cluster.json:2: devices[1].name",
        "its own name",
    ),
    "link to an unknown device": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "do"], {LINK}}}]}}}}',
        'links.between[0].devices[1]: no device "do" in this cluster',
        "cluster.json:1: links.between[0].devices[1]",
        'did you mean "d0"?',
    ),
    "link to an unknown host": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"hosts": ["b", "localhost"], {LINK}}}]}}}}',
        'links.between[0].hosts[0]: no host "b" in this cluster',
        "cluster.json:1: links.between[0].hosts[0]",
        "known: localhost",
    ),
    "link of one device": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0"], {LINK}}}]}}}}',
        "links.between[0].devices: expected two names, found 1",
        "cluster.json:1: links.between[0].devices",
        '["a", "b"]',
    ),
    "link to itself": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "d0"], {LINK}}}]}}}}',
        'links.between[0].devices: device "d0" is linked to itself',
        "cluster.json:1: links.between[0].devices",
        "two devices",
    ),
    "link of nothing": (
        f'{{"devices": [{D0}], "links": {{"between": [{{{LINK}}}]}}}}',
        'links.between[0]: expected either "devices" or "hosts", found neither',
        "cluster.json:1: links.between[0]",
        '"hosts"',
    ),
    "link of both": (
        f'{{"devices": [{D0}], "links": {{"between": [{{"devices": ["d0", "d1"], '
        f'"hosts": ["a", "b"], {LINK}}}]}}}}',
        'links.between[0]: expected either "devices" or "hosts", found both',
        "cluster.json:1: links.between[0]",
        '"hosts"',
    ),
    "same link twice": (
        f'{{"devices": [{D0}, {D0.replace("d0", "d1")}], "links": {{"between": '
        f'[{{"devices": ["d0", "d1"], {LINK}}},\n{{"devices": ["d1", "d0"], {LINK}}}]}}}}',
        'links.between[1].devices: the pair "d1", "d0" is already in links.between[0]',
        "cluster.json:2: links.between[1].devices",
        "both ways",
    ),
    "no latency": (
        f'{{"devices": [{D0}], "links": {{"default": {{"bandwidth": "1GB/s"}}}}}}',
        "links.default.latency: this field is missing",
        "cluster.json:1: links.default.latency",
        'add "latency": "50us"',
    ),
    "too many devices": (
        json.dumps({"devices": [{"name": f"d{i}", "preset": "t4"} for i in range(4097)]}),
        "devices: more than 4096 devices",
        "cluster.json:1: devices",
        "at most 4096",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str) -> None:
    text, what, at, help = BAD[case]
    error = error_of(text)
    assert what in error.what
    assert error.at == at
    assert help in (error.help or "")


@pytest.mark.parametrize(
    "name", ["d0; rm -rf ~", "$(id)", "a b", "-d", "../d", "a/b", "d\n", "", "é"]
)
def test_device_names_are_safe(name: str) -> None:
    text = f'{{"devices": [{{"name": {json.dumps(name)}, {CPU}}}]}}'
    error = error_of(text)
    assert error.what.startswith("devices[0].name: not a device name")
    assert error.at == "cluster.json:1: devices[0].name"


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
    error = error_of(f'{{"devices": [{{"name": "d0", "host": {json.dumps(host)}, {CPU}}}]}}')
    assert error.what.startswith("devices[0].host: not a host name or address")


def test_the_first_fault_of_the_file_is_the_error_and_the_others_are_notes() -> None:
    text = """{"devices": [
      {"name": "d0", "preset": "t4", "memory": 3},
      {"name": "d1", "preset": "t4", "threads": 0},
      {"name": "d2", "preset": "t4", "colour": 1}]}"""
    error = error_of(text)
    assert error.at == "cluster.json:2: devices[0].memory"
    assert [note.partition(": ")[0] for note in error.notes] == [
        "also cluster.json:3",
        "also cluster.json:4",
    ]


def test_a_long_value_is_cut_and_escaped() -> None:
    error = error_of(f'{{"devices": [{{"name": "d0", "preset": "\\u001b{"x" * 10_000}"}}]}}')
    assert len(error.what) < 120
    assert "\x1b" not in str(error)


# --------------------------------------------------------------------------- files


def test_a_fault_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"devices": []}', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    assert caught.value.at == f"{path}:1: devices"


@pytest.mark.parametrize(
    ("content", "what", "suffix"),
    [
        (None, "No such file", ""),
        (b" " * 1_000_001, "larger than 1,000,000 bytes", ""),
        (b'{\n"devices": "\xff"}', "not UTF-8 text: byte 14 is 0xff", ":2"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, what: str, suffix: str) -> None:
    path = tmp_path / "cluster.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        read_cluster(path)
    assert caught.value.at == f"{path}{suffix}"
    assert caught.value.exit_code == 2


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="directory"):
        read_cluster(tmp_path)


def test_every_object_of_the_file_can_say_what_it_may_hold() -> None:
    def below(kind: type[StrictModel]) -> set[type[StrictModel]]:
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    assert below(StrictModel) - {StrictModel} == set(_ENTRIES.values())


def test_other_unknown_fields_are_told_what_may_be_meant() -> None:
    found = error_of(f'{{"devices": [{D0}], "link": {{{LINK}}}, "junk": 1, "store": []}}')
    assert 'did you mean "links"?' in (found.help or "")
    assert [note.partition("unknown ")[2] for note in found.notes] == [
        'field "junk"',
        'field "store" (did you mean "stores"?)',
    ]
