"""Tensor groups: graphs of members, exported weights, and options that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.bundles import export_weights
from bigbrain_fx.core import Shard
from bigbrain_fx.emit import bundle_texts, write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import ModelFile
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_divided
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    chosen_axes,
    group_warnings,
    make_plan,
    wanted_axes,
)
from bigbrain_fx.plan.tensor.messages import LARGE, pieces
from bigbrain_fx.runtime import group, joined
from bigbrain_fx.verification.members import CLOSE, same_graph
from bigbrain_fx.verification.reference import MembersReference
from tests.support.bundles import MODEL
from tests.support.training import AXES, BFLOAT16, HEADS, bench_of, equal, grouped
from tools.conformance.matrix import Bench

pytestmark = pytest.mark.usefixtures("one_thread")


def test_planner_and_runtime_divide_sums_alike() -> None:
    for members in (2, 3, 5, 8):
        for numel in (1, LARGE - 1, LARGE, LARGE + 1, 100_003):
            found = pieces(numel, members)
            assert found == group.pieces(numel, members)
            assert sum(found) == numel
            assert len(found) == (members if members > 2 and numel >= LARGE else 1)


GRAPHS: dict[str, tuple[str, int, Mapping[str, object], int | None]] = {
    "group": (HEADS, 2, {}, None),
    "autocast": (HEADS + BFLOAT16, 4, {"tensor_shares": (3, 1)}, None),
    "few rows": (HEADS, 2, {}, 1),
    "sequence": (HEADS, 3, {"tensor": 3, "tensor_shares": (2, 1, 1), **AXES}, None),
    "sequence, weights wait": (HEADS, 6, {"tensor": 3, "schedule": "zb-h1", **AXES}, None),
}


@pytest.mark.gate("group", "few rows", "sequence")
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_members_are_the_captured_graph_to_rounding(name: str) -> None:
    """To 1e-5 in its own types, and 1e-12 in float64."""
    text, devices, choices, few = GRAPHS[name]
    bench = bench_of(text)
    found = same_graph(bench.captured, grouped(bench, devices, **choices), few=few)
    assert found["passed"] is True, found
    assert ("micro-batches of 1 rows" in str(found["name"])) is (few == 1)


@pytest.mark.nightly
def test_rounding_of_sixteen_bits_is_no_difference() -> None:
    bench = bench_of(MODEL.replace("    return Net()", "    return Net().bfloat16()"))
    found = same_graph(bench.captured, grouped(bench, 2))
    assert found["passed"] is True, found
    largest = float(str(found["detail"]).split(" in its own types")[0].split()[-1])
    assert largest > CLOSE[0][1]  # or the case says nothing


def test_a_wrong_share_of_a_sum_is_not_rounding(
    heads: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that is not bitwise still tells a sum that lacks a part."""
    from bigbrain_fx.frontend.tracing.executor import tensor_parallel

    plan = grouped(heads, 2)
    monkeypatch.setattr(tensor_parallel, "added", lambda parts: parts[0] + 0.999 * parts[1])
    assert same_graph(heads.captured, plan)["passed"] is False


@pytest.mark.nightly
def test_under_autocast_members_are_as_near_to_float32_as_plain_torch_is() -> None:
    bench = bench_of(HEADS.replace("0.1", "0.0") + BFLOAT16)
    file, captured = bench.file, bench.captured
    plan = grouped(bench, 2, micro_batches=1)
    wide, cast = plain_gradients(file, None), plain_gradients(file, file.autocast)
    tensors = {name: tensor.detach() for name, tensor in captured.tensors.items()}
    reference = MembersReference(plan, tensors, captured.functions)
    _, found = reference.of_each([captured.inputs(plan.rows)], 0, 0)
    ours = whole_gradients(plan, reference, found)
    assert set(ours) == set(wide)
    rounding = max(distance(cast[name], wide[name]) for name in wide)
    assert rounding > 1e-4  # or float32 was compared with itself
    assert max(distance(ours[name], wide[name]) for name in wide) < 2 * rounding


def plain_gradients(file: ModelFile, autocast: str | None) -> dict[str, Tensor]:
    """Return a batch's gradients as plain PyTorch makes them."""
    batch = cast("dict[str, Tensor]", file.example_batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        assert file.loss is not None
        loss = file.loss(file.model(batch["letters"]), batch)
    named = dict(file.model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def whole_gradients(
    plan: Plan, reference: MembersReference, found: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Put the members' parts of gradients together."""
    made = {}
    for name, gradient in found[0].items():
        own = [reference.shards.get((name, member)) for member in range(plan.stages.members)]
        shards = [shard for shard in own if shard is not None]
        lengths = [shard.stop - shard.start for shard in shards]
        parts = [each[name] for each in found]
        made[name] = joined(parts, shards[0].dim, shards[0].inner, lengths) if shards else gradient
    return made


def distance(found: Tensor, want: Tensor) -> float:
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.nightly
def test_trained_weights_of_groups_are_exported_whole(heads: Bench, tmp_path: Path) -> None:
    plan = grouped(heads, 2, tensor_shares=(3, 1))
    folder = write_bundle(plan, heads, tmp_path / "bundle")
    export_weights(folder, tmp_path / "model.safetensors")
    found, want = load_file(tmp_path / "model.safetensors"), heads.file.model.state_dict()
    assert set(found) == set(want)
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_files_of_members_differ_in_numbers_only(heads: Bench) -> None:
    plan = grouped(heads, 2)
    texts = bundle_texts(plan)
    blocks = texts["model_blocks.py"]
    own = [texts[name] for name in ("device_d0.py", "device_d1.py")]
    classes = [text.partition("class Stage")[0].partition("class ")[2] for text in own]
    first = classes[1].replace("letters - 14", "letters")  # nothing lies before the first part
    assert without_numbers(classes[0]) == without_numbers(first)
    assert "self.qkv(copy_to_group(x, self.group))" in blocks
    assert "all_reduce(" in blocks


def without_numbers(text: str) -> str:
    return "".join("#" if letter.isdigit() else letter for letter in text).replace("##", "#")


def test_an_axis_has_a_part_for_each_member(heads: Bench) -> None:
    graph = heads.captured.graph
    options = Options(tensor=4, tensor_axes=("heads",))
    assert [axis.size for axis in wanted_axes(graph, options)] == [4]
    assert not chosen_axes(wanted_axes(graph, options), 5)


def test_axes_of_alike_layers_are_named_as_explain_gathers_them(heads: Bench) -> None:
    options = Options(tensor=2, tensor_axes=("blocks.*:hidden.*",))
    names = [axis.name for axis in wanted_axes(heads.captured.graph, options)]
    assert [name.split(":")[0] for name in names] == [f"blocks.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"tensor": 3}, "groups of 3 devices, and the cluster has 4"),
        (
            {"tensor_shares": (3, 1, 1)},
            "for 2 devices that compute together give one share for each: --tp-ratio 1:1",
        ),
        ({"tensor": 1, "tensor_shares": (3, 1)}, "add --tensor-parallel 2"),
        ({"tensor_axes": ("head",)}, "the nearest are heads"),
        ({"zero_stage": 1}, "a single replica: it divides among replicas"),
        ({"tensor": 4, "schedule": "zb-v"}, "these 4 devices are one use --schedule 1f1b"),
    ],
)
def test_options_against_groups_are_refused(
    heads: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        grouped(heads, 4, **choices)
    assert said in f"{caught.value.what} {caught.value.help}"


def test_more_members_than_an_axis_has_parts(heads: Bench) -> None:
    with pytest.raises(InputError, match="the longest has 4"):
        grouped(heads, 8, tensor=8, tensor_axes=("heads",))


CARDS = "a100-80", "a100-40"


def test_members_that_would_round_otherwise_are_refused(heads: Bench) -> None:
    first, other = equal(2).devices
    options = Options("naive", micro_batches=4, tensor=2)
    first = replace(first, processor="EPYC 7763")
    for unlike in (
        replace(other, host="elsewhere", processor="Xeon 8481C"),
        replace(other, threads=4),
    ):
        where = replace(equal(2), devices=(first, unlike))
        with pytest.raises(InputError, match="drift apart"):
            make_plan(heads.captured.graph, where, Source(""), options)
    cards = [
        replace(device, kind="cuda", processor="", preset=preset)
        for device, preset in zip((first, other), CARDS, strict=True)
    ]
    for devices in ((first, replace(other, kind="cuda")), tuple(cards)):
        where = replace(equal(2), devices=devices)
        with pytest.raises(InputError, match="drift apart"):
            make_plan(heads.captured.graph, where, Source(""), options)


def test_groups_of_gpus_are_planned_and_warned_of(heads: Bench) -> None:
    cards = [replace(device, kind="cuda", preset=CARDS[0]) for device in equal(2).devices]
    where = replace(equal(2), devices=tuple(cards))
    about = heads.captured.graph, where, Source("")
    plan = make_plan(*about, Options("naive", micro_batches=4, tensor=2))
    (said,) = group_warnings(plan)
    assert "were run on CPUs, and over gloo by two processes of one GPU" in said
    assert make_plan(*about, Options("auto", effort="fast")).placement.tensor is None


def test_a_group_over_two_hosts_is_warned_of(heads: Bench) -> None:
    first, other = equal(2).devices
    where = replace(equal(2), devices=(first, replace(other, host="elsewhere")))
    options = Options("naive", micro_batches=4, tensor=2)
    plan = make_plan(heads.captured.graph, where, Source(""), options)
    (said,) = group_warnings(plan)
    assert f"d0+d1 are one tensor group on the hosts {first.host}, elsewhere" in said
    assert "are exchanges between its ranks, over the network" in said
    assert not group_warnings(grouped(heads, 4, tensor=2))


def test_an_optimizer_that_looks_across_a_row_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 4))
    shards = [Shard("0.weight", m, 0, 4, 1, 2 * m, 2 * m + 2) for m in range(2)]
    require_divided(module, lambda named: torch.optim.AdamW([p for _, p in named]), shards)
    with pytest.raises(InputError, match="more than one number at a time"):
        require_divided(module, lambda named: torch.optim.Adafactor([p for _, p in named]), shards)
