"""The comparison of estimators: what is left out is not seen, and what is printed is what is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bigbrain_fx.costs.fit import is_measured, work_of
from bigbrain_fx.costs.model import expected_s
from bigbrain_fx.costs.profiles import ProfileStore
from tests.support.fitted import CPU, GPU, rows
from tools import compare_estimators
from tools.compare_estimators import Point, by_device, by_family, by_fifth, by_model, compare, score
from tools.feature_sets import chosen, family_factors, few_features
from tools.published_layers import constant_ratios, read_layers, read_published

GRAPH = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Conv2d(64, 128, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False) -- forward_compute_time=1.500, backward_compute_time=2.616, activation_size=51200.000, parameter_size=589824.000
node3 -- BatchNorm2d(128, eps=1e-05, momentum=0.1) -- forward_compute_time=0.500, backward_compute_time=0.376, activation_size=51200.000, parameter_size=1024.000
node4 -- Linear(in_features=100, out_features=10, bias=True) -- forward_compute_time=0.200, backward_compute_time=0.376, activation_size=320.000, parameter_size=1024.000
node5 -- LSTM(1024, 1024) -- forward_compute_time=4.000, backward_compute_time=0.010, activation_size=[8192.0; 4096.0; 4096.0], parameter_size=1024.000
node6 -- Strange(7) -- forward_compute_time=4.000, backward_compute_time=0.010, activation_size=8192.0, parameter_size=1024.000
\tnode1 -- node2
"""  # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def quick() -> object:
    """Two learned methods say enough."""
    with pytest.MonkeyPatch.context() as patch:
        few = {"linear": ("linear", False), "SVM": ("svm", False)}
        patch.setattr(compare_estimators, "LEARNED", few)
        patch.setattr(compare_estimators, "OF_SECONDS", {"linear, of seconds": "linear"})
        patch.setattr(compare_estimators, "SCENARIO", {"a factor a family": family_factors})
        yield


# --------------------------------------------------------------------------- what is left out


def test_every_split_keeps_seen_and_unseen_apart() -> None:
    some = rows()
    origins = {p.signature.key: frozenset({"a", "b"} if i % 3 == 0 else {"a"})
               for i, (_, p) in enumerate(some)}  # fmt: skip
    for parts in (by_fifth(some), by_family(some), by_device(some), by_model(some, origins)):
        found = list(parts)
        assert found
        for _, seen, unseen in found:
            assert len(seen) + len(unseen) == len(some)
            assert not {id(row) for row in seen} & {id(row) for row in unseen}


def test_a_fifth_takes_whole_signatures_and_all_of_them_once() -> None:
    some = rows()
    held = [{p.signature.key for _, p in unseen} for _, _, unseen in by_fifth(some)]
    assert len(held) == 5
    assert sum(map(len, held)) == len({p.signature.key for _, p in some})


def test_a_family_out_has_none_of_it_left() -> None:
    parts = {held: seen for held, seen, _ in by_family(rows())}
    assert sorted(parts) == ["gelu", "linear", "mul", "relu"]
    assert all("gelu" not in p.signature.target for _, p in parts["gelu"])


def test_a_model_out_takes_the_ops_that_it_shares() -> None:
    some = rows(machines=[CPU])
    shared = some[0][1].signature.key
    origins = {p.signature.key: frozenset({"a"}) for _, p in some[1:]}
    origins[shared] = frozenset({"a", "b"})
    parts = {held: (seen, unseen) for held, seen, unseen in by_model(some, origins)}
    assert [p.signature.key for _, p in parts["b"][1]] == [shared]
    assert parts["a"][0] == []


def test_origins_are_kept_and_merged(tmp_path: Path) -> None:
    ours, theirs = ProfileStore(tmp_path / "a.sqlite"), ProfileStore(tmp_path / "b.sqlite")
    ours.credit("gpt", "x", "y")
    ours.credit("gpt", "x")
    theirs.credit("moe", "y", "z")
    ours.merge(tmp_path / "b.sqlite")
    both = {"x": {"gpt"}, "y": {"gpt", "moe"}, "z": {"moe"}}
    assert ProfileStore(tmp_path / "a.sqlite", read_only=True).origins() == both


def test_one_device_cannot_be_left_out() -> None:
    assert list(by_device(rows(machines=[CPU]))) == []
    assert [held for held, _, _ in by_device(rows())] == ["Some CPU", "Some GPU"]


# --------------------------------------------------------------------------- forecasts


def test_all_methods_are_judged_on_the_same_times() -> None:
    some = rows(machines=[CPU])
    points = list(compare("x", by_fifth(some)))
    expected = sum(
        is_measured(p, phase)
        for _, p in some
        for phase in ("forward", "backward_input", "backward_weight")
    )
    for method in ("analytical", "linear", "SVM"):
        found = [point for point in points if point.method == method]
        assert len(found) == expected
    linear = score([point for point in points if point.method == "linear"])
    assert 0.0 < linear.median < 0.3


def test_a_score_is_of_seconds() -> None:
    def point(forecast_s: float, measured_s: float, held: str = "a") -> Point:
        return Point("s", "m", held, "relu", "forward", forecast_s, measured_s)

    found = score([point(2.0, 1.0), point(1.0, 2.0), point(3.0, 3.0, "b"), point(2.2, 2.0, "b")])
    assert found.points == 4
    assert found.mape == pytest.approx((1.0 + 0.5 + 0.0 + 0.1) / 4)
    assert found.median == pytest.approx(0.3)
    assert found.total == pytest.approx((0.0 + 0.04) / 2)


# --------------------------------------------------------------------------- few features


def test_of_features_that_go_together_one_stands_for_all() -> None:
    dice = np.random.default_rng(3)
    size, kind = dice.normal(size=(2, 200))
    x = np.column_stack([size, size + 0.1 * dice.normal(size=200), kind, np.ones(200)])
    found = chosen(x, 3.0 * size - kind, ("size", "bytes", "kind", "constant"), 5)
    assert [(feature.name, feature.alike) for feature in found] == [("size", 2), ("kind", 1)]
    assert found[0].correlation > 0.8 > 0.0 > found[1].correlation
    assert [feature.name for feature in chosen(x, kind, ("s", "b", "k", "c"), 1)] == ["k"]


def test_a_family_that_was_seen_has_its_own_factor() -> None:
    some = [(CPU, p) for _, p in rows(machines=[CPU]) if "mul" not in p.signature.target]
    mul = [(CPU, p) for _, p in rows(machines=[CPU]) if "mul" in p.signature.target]
    slow = [
        (CPU, replace(p, forward_s=8.0 * expected_s(work_of(p), CPU)["forward"]))
        if "relu" in p.signature.target
        else (CPU, replace(p, forward_s=expected_s(work_of(p), CPU)["forward"]))
        for _, p in some
    ]
    relu = next(row for row in slow if "relu" in row[1].signature.target)
    (forward_s,) = family_factors(slow, [relu], "forward")
    assert 4.0 < forward_s / expected_s(work_of(relu[1]), CPU)["forward"] < 8.0
    (unseen_s,) = family_factors(slow, mul[:1], "forward")
    assert unseen_s == pytest.approx(expected_s(work_of(mul[0][1]), CPU)["forward"])


def test_few_features_forecast_what_a_formula_made() -> None:
    some = rows(machines=[CPU])
    seen, asked = some[::2], some[1::2]
    found = few_features(seen, asked, "forward", count=5, of_seconds=True)
    errors = [abs(s / p.forward_s - 1.0) for s, (_, p) in zip(found, asked, strict=True)]
    naive = [abs(1e-5 / p.forward_s - 1.0) for _, p in asked]
    assert sorted(errors)[len(errors) // 2] < 0.5 < sorted(naive)[len(naive) // 2]


# --------------------------------------------------------------------------- published profiles


def test_layers_are_read_as_ops(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    conv, norm, linear, lstm = read_layers(path)
    assert conv.signature.tensors[1].shape == (128, 64, 3, 3)
    assert conv.signature.outputs == ("float32[100, 128]",)
    assert conv.signature.tensors[0].shape == (400, 64)  # stride 2
    assert conv.flops == 2 * 12800 * 64 * 9
    assert conv.forward_s == pytest.approx(1.5e-3)
    assert norm.signature.tensors[0].shape == (100, 128)
    assert linear.flops == 2 * 8 * 10 * 100
    assert lstm.signature.outputs == ("float32[2, 1024]",)  # the first of its results


def test_a_cpu_that_is_a_multiple_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "dnn-partitioning" / "throughput-inputs" / "LayerGraphs"
    folder.mkdir(parents=True)
    for name, times in (("same", (1.0, 2.0)), ("other", (1.0, 3.0))):
        nodes = [{"fpgaLatency": i + 1.0, "cpuLatency": 10.0 * t} for i, t in enumerate(times)]
        (folder / f"{name}.json").write_text(json.dumps({"nodes": nodes}))
    found = constant_ratios(tmp_path)
    assert sorted(found.values(), key=str) == [10.0, None]
    assert read_published(tmp_path).rows == ()


# --------------------------------------------------------------------------- the command


@pytest.mark.nightly
def test_the_command_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base, out = tmp_path / "p.sqlite", tmp_path / "estimators.md"
    store = ProfileStore(base)
    profiles = [profile for _, profile in rows(machines=[CPU])]
    store.put(CPU, *profiles)
    store.credit("even", *(profile.signature.key for profile in profiles[::2]))
    store.credit("odd", *(profile.signature.key for profile in profiles[1::2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_estimators, "METHODS", ("analytical", "linear", "SVM"))
        patch.setattr("tools.compare_report.METHODS", ("analytical", "linear", "SVM"))
        for module in ("tools.compare_estimators", "tools.compare_report"):
            patch.setattr(f"{module}.BESIDE", ("linear, of seconds", "a factor a family"))
        done = CliRunner().invoke(
            compare_estimators.main,
            [str(base), "--out", str(out), "--json"],
            catch_exceptions=False,
        )
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["summary"]["wrote"] == str(out)
    cells = {(line["split"], line["method"]): line for line in lines[:-1]}
    text = out.read_text()
    assert CPU.key in text
    assert GPU.key not in text
    for (split, _), cell in cells.items():
        assert f"| {split} | {cell['points']} |" in text
    assert "estimators.svg" in text
    assert (tmp_path / "estimators.svg").read_text().lstrip().startswith("<?xml")
    assert (tmp_path / "estimators.svg").stat().st_size < 300_000


def test_no_database_is_said_in_words(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        compare_estimators.main, [str(tmp_path / "p.sqlite"), "--out", str(tmp_path / "x.md")]
    )
    assert done.exit_code == 1
    assert "found no such file" in done.output
