"""Tensor groups: in-process bundles have the bits of a reference that runs members in lockstep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.bundles import export_weights
from bigbrain_fx.core import Cluster, Device, Link, Shard
from bigbrain_fx.emit import bundle_texts, write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import ModelFile, capture, load_model_file
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_divided
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    chosen_axes,
    group_warnings,
    make_plan,
    part_channels,
    wanted_axes,
)
from bigbrain_fx.plan.tensor.messages import LARGE, pieces
from bigbrain_fx.runtime import group, joined
from bigbrain_fx.verification.imported_bundle import batches_of, run_bundle, weights_of
from bigbrain_fx.verification.links import same_training
from bigbrain_fx.verification.members import (
    CLOSE,
    same_graph,
    same_leaves,
)
from bigbrain_fx.verification.reference import MembersReference
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.verification.training import train_reference
from tests.support.bundles import MODEL
from tools.conformance.matrix import Bench, imported, other_bytes

STEPS = 2
ATTENTION = """class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(n, length, 16))


class Net("""
HEADS = MODEL.replace("class Net(", ATTENTION).replace(
    "self.norm = nn.LayerNorm(16)\n        self.head",
    "self.norm = nn.Sequential(Mixed(), nn.LayerNorm(16))\n        self.head",
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(HEADS)
    file = load_model_file(path)
    return Bench(file, capture(file.model, file.example_batch, file.loss, name="net"), STEPS)


def cluster(count: int) -> Cluster:
    made = (Device(f"d{i}", "h", "cpu", 2**33, 1e9, 12e9, 1e-6) for i in range(count))
    return Cluster(tuple(made), Link(50e-6, 1e9))


def planned(bench: Bench, devices: int, **choices: object) -> Plan:
    file, graph = bench.file, bench.captured.graph
    source = Source(str(file.path), True, False, True, True, file.clip_norm, "")
    given = {"partitioner": "naive", "micro_batches": 4, "tensor": 2, **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    return make_plan(graph, cluster(devices), source, options)


def trained(bench: Bench, plan: Plan, folder: Path) -> tuple[Trace, str]:
    """Train a bundle and its reference; return what the bundle made, and what differs."""
    write_bundle(plan, bench, folder)
    with imported(folder, force_adamw=False) as bundle:
        weights, stream = weights_of(folder, plan), batches_of(bundle, plan)
        reference = MembersReference(plan, weights, bench.captured.functions)
        leaves = same_leaves(plan, weights, bench.captured.functions, stream(0), 1e-6)
        assert leaves["passed"], leaves
        expected = train_reference(
            reference, stream, bundle.BUNDLE.training, bench.steps, plan.seed
        )
        actual = run_bundle(bundle, plan, bench.steps, plan.seed)
    failed = [c for c in same_training(plan, expected, actual) if c["passed"] is False]
    found = "; ".join(f"{c['name']}: {c['detail']}" for c in failed)
    return actual, found or other_bytes(expected, actual)


@pytest.mark.gate("4-2-shares3-None")
@pytest.mark.parametrize(
    ("devices", "members", "shares", "schedule"),
    [(2, 2, (), None), (4, 2, (), "gpipe"), (3, 3, (2, 1, 1), None), (4, 2, (3, 1), None)],
)
def test_a_bundle_has_the_bits_of_its_members_in_lockstep(
    bench: Bench,
    tmp_path: Path,
    devices: int,
    members: int,
    shares: tuple[int, ...],
    schedule: str | None,
) -> None:
    plan = planned(bench, devices, tensor=members, tensor_shares=shares, schedule=schedule)
    assert plan.stages.members == members
    assert len(plan.stages.stages) == devices
    parts = {shard.param for shard in plan.sharded.shards}
    assert {"embed.weight", "head.weight", "norm.0.qkv.weight", "blocks.0.up.weight"} <= parts
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike
    assert {f"norm.0.qkv.weight[{m}]" for m in range(members)} <= set(actual.tensors)


WIDE = """import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(160, 96), nn.GELU(), nn.Linear(96, 160), nn.LayerNorm(160))


def loss(output, batch):
    return output.square().mean()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield {"input": torch.randn(256, 160, generator=dice)}


def example_batch():
    return next(batches(0))


def lr_scale(step):
    return 1.0 / (1 + step)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("members", "shares"), [(3, ()), (4, (2, 1, 1, 2))])
def test_sums_of_large_tensors_in_pieces_have_the_same_bits(
    tmp_path: Path, members: int, shares: tuple[int, ...]
) -> None:
    """The reference adds whole tensors; members add a piece each, of unequal lengths for three."""
    (tmp_path / "net.py").write_text(WIDE)
    file = load_model_file(tmp_path / "net.py")
    wide = Bench(file, capture(file.model, file.example_batch, file.loss, name="net"), STEPS)
    plan = planned(wide, members, tensor=members, tensor_shares=shares, micro_batches=2)
    lengths = pieces(128 * 160, members)
    sent = {part.numel for part in part_channels(plan) if part.sender == "d0"}
    assert set(lengths) <= sent
    assert 128 * 160 not in sent
    actual, fault = trained(wide, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike


def test_planner_and_runtime_divide_sums_alike() -> None:
    for members in (2, 3, 5, 8):
        for numel in (1, LARGE - 1, LARGE, LARGE + 1, 100_003):
            found = pieces(numel, members)
            assert found == group.pieces(numel, members)
            assert sum(found) == numel
            assert len(found) == (members if members > 2 and numel >= LARGE else 1)


def test_the_graph_and_what_members_run_of_it_agree(bench: Bench) -> None:
    assert same_graph(bench.captured, planned(bench, 2))["passed"] is True


def test_a_wrong_share_of_a_sum_is_not_rounding(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that is not bitwise still tells a sum that lacks a part."""
    from bigbrain_fx.frontend.tracing.executor import tensor_parallel

    plan = planned(bench, 2)
    monkeypatch.setattr(tensor_parallel, "added", lambda parts: parts[0] + 0.999 * parts[1])
    assert same_graph(bench.captured, plan)["passed"] is False


@pytest.mark.nightly
def test_rounding_of_sixteen_bits_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    half = MODEL.replace("    return Net()", "    return Net().bfloat16()")
    assert half != MODEL
    path.write_text(half)
    file = load_model_file(path)
    captured = capture(file.model, file.example_batch, file.loss, name="net")
    plan = planned(Bench(file, captured, STEPS), 2)
    found = same_graph(captured, plan)
    assert found["passed"] is True, found
    largest = float(str(found["detail"]).split(" in its own types")[0].split()[-1])
    assert largest > CLOSE[0][1]  # or the case says nothing


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The same model under autocast: bias and dropout in single steps, words over all members."""
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(HEADS + '\n\nautocast = "bfloat16"\n')
    file = load_model_file(path)
    captured = capture(
        file.model, file.example_batch, file.loss, name="net", autocast=file.autocast
    )
    return Bench(file, captured, STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "choices",
    [{"tensor_shares": (3, 1)}, {"replicas": 2, "sum_order": "micro", "recompute": "all"}],
)
def test_members_under_autocast(half: Bench, tmp_path: Path, choices: dict[str, object]) -> None:
    """Exact bits of the reference; the graph to its own rounding, and in float64."""
    plan = planned(half, 4, **choices)
    assert same_graph(half.captured, plan)["passed"] is True
    sent = {part.dtype for part in part_channels(plan)}
    assert sent == {"bfloat16", "float32"}
    actual, fault = trained(half, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike
    text = (tmp_path / "bundle" / "device_d0.py").read_text()
    assert "dtype=torch.bfloat16, cache_enabled=False):" in text


@pytest.mark.nightly
def test_under_autocast_members_are_as_near_to_float32_as_plain_torch_is(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(HEADS.replace("0.1", "0.0") + '\n\nautocast = "bfloat16"\n')
    file = load_model_file(path)
    captured = capture(
        file.model, file.example_batch, file.loss, name="net", autocast=file.autocast
    )
    plan = planned(Bench(file, captured, STEPS), 2, micro_batches=1)
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
def test_trained_weights_of_groups_are_exported_whole(bench: Bench, tmp_path: Path) -> None:
    plan = planned(bench, 2, tensor_shares=(3, 1))
    folder = write_bundle(plan, bench, tmp_path / "bundle")
    export_weights(folder, tmp_path / "model.safetensors")
    found, want = load_file(tmp_path / "model.safetensors"), bench.file.model.state_dict()
    assert set(found) == set(want)
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_files_of_members_differ_in_numbers_only(bench: Bench) -> None:
    plan = planned(bench, 2)
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


def test_an_axis_has_a_part_for_each_member(bench: Bench) -> None:
    graph = bench.captured.graph
    options = Options(tensor=4, tensor_axes=("heads",))
    assert [axis.size for axis in wanted_axes(graph, options)] == [4]
    assert not chosen_axes(wanted_axes(graph, options), 5)


def test_axes_of_alike_layers_are_named_as_explain_gathers_them(bench: Bench) -> None:
    options = Options(tensor=2, tensor_axes=("blocks.*:hidden.*",))
    names = [axis.name for axis in wanted_axes(bench.captured.graph, options)]
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
    bench: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        planned(bench, 4, **choices)
    assert said in f"{caught.value.what} {caught.value.help}"


def test_more_members_than_an_axis_has_parts(bench: Bench) -> None:
    with pytest.raises(InputError, match="the longest has 4"):
        planned(bench, 8, tensor=8, tensor_axes=("heads",))


CARDS = "a100-80", "a100-40"


def test_members_that_would_round_otherwise_are_refused(bench: Bench) -> None:
    first, other = cluster(2).devices
    options = Options("naive", micro_batches=4, tensor=2)
    first = replace(first, processor="EPYC 7763")
    for unlike in (
        replace(other, host="elsewhere", processor="Xeon 8481C"),
        replace(other, threads=4),
    ):
        where = replace(cluster(2), devices=(first, unlike))
        with pytest.raises(InputError, match="drift apart"):
            make_plan(bench.captured.graph, where, Source(""), options)
    cards = [
        replace(device, kind="cuda", processor="", preset=preset)
        for device, preset in zip((first, other), CARDS, strict=True)
    ]
    for devices in ((first, replace(other, kind="cuda")), tuple(cards)):
        where = replace(cluster(2), devices=devices)
        with pytest.raises(InputError, match="drift apart"):
            make_plan(bench.captured.graph, where, Source(""), options)


def test_groups_of_gpus_are_planned_and_warned_of(bench: Bench) -> None:
    cards = [replace(device, kind="cuda", preset=CARDS[0]) for device in cluster(2).devices]
    where = replace(cluster(2), devices=tuple(cards))
    about = bench.captured.graph, where, Source("")
    plan = make_plan(*about, Options("naive", micro_batches=4, tensor=2))
    (said,) = group_warnings(plan)
    assert "were run on CPUs, and over gloo by two processes of one GPU" in said
    assert make_plan(*about, Options("auto", effort="fast")).placement.tensor is None


def test_a_group_over_two_hosts_is_warned_of(bench: Bench) -> None:
    first, other = cluster(2).devices
    where = replace(cluster(2), devices=(first, replace(other, host="elsewhere")))
    options = Options("naive", micro_batches=4, tensor=2)
    plan = make_plan(bench.captured.graph, where, Source(""), options)
    (said,) = group_warnings(plan)
    assert f"d0+d1 are one tensor group on the hosts {first.host}, elsewhere" in said
    assert "are exchanges between its ranks, over the network" in said
    assert not group_warnings(planned(bench, 4, tensor=2))


def test_an_optimizer_that_looks_across_a_row_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 4))
    shards = [Shard("0.weight", m, 0, 4, 1, 2 * m, 2 * m + 2) for m in range(2)]
    require_divided(module, lambda named: torch.optim.AdamW([p for _, p in named]), shards)
    with pytest.raises(InputError, match="more than one number at a time"):
        require_divided(module, lambda named: torch.optim.Adafactor([p for _, p in named]), shards)
