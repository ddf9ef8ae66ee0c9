"""Deaths in runs with replicas: the state comes from a peer, with the bits of plain PyTorch."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import bigbrain_fx
from bigbrain_fx.core import Cluster
from bigbrain_fx.plan import Options, replica_cut
from tests.support.bundles import MODEL, cluster
from tests.support.replayed import Fault, Seen, supervised

MICROS, STEPS = 4, 6
UNLIKE = (("d0", "d1", "d2"), ("d3", "d4"))  # cut at other places, so no device has one peer
ALONE = {"self.drop = nn.Dropout(0.1)": "self.drop = nn.Identity()",  # plain PyTorch has no keys
         "        self.head.weight = self.embed.weight\n": ""}  # fmt: skip


def split(
    folder: Path,
    replicas: tuple[tuple[str, ...], ...],
    text: str = MODEL,
    shares: tuple[int, ...] = (),
    schedule: str = "1f1b",
    extras: tuple[str, ...] = (),
) -> Path:
    """Split the model, untied and without dropout, with sums in the order of one process."""
    for old, new in ALONE.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(text)
    whole = cluster(sum(map(len, replicas)))
    devices = Cluster(whole.devices, whole.default_link, replicas=replicas)
    options = Options("naive", schedule=schedule, micro_batches=MICROS)
    options = replace(options, replicas=len(replicas), sum_order="micro")
    options = replace(options, replica_shares=shares)
    made = bigbrain_fx.split(
        folder / "letters.py", devices, folder / "bundle", options, extras=extras
    )
    return made.bundle


def named(devices: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(devices))


def plain(bundle: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in plain PyTorch, one process; return losses and what the model then holds."""
    module = _imported(bundle.parent / "letters.py")
    net = module.model().train()
    found = [load_file(path) for path in sorted((bundle / "weights").glob("*.safetensors"))]
    net.load_state_dict({name: tensor for each in found for name, tensor in each.items()})
    optimizer = torch.optim.AdamW(net.named_parameters())
    (rate,) = (group["lr"] for group in optimizer.param_groups)
    losses, batches = [], module.batches(0)
    for step in range(steps):
        batch = next(batches)
        parts = [{k: v.chunk(MICROS)[m] for k, v in batch.items()} for m in range(MICROS)]
        seen = [module.loss(net(part["letters"]), part) for part in parts]
        for loss in seen:
            (loss / MICROS).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), module.clip_norm)
        optimizer.param_groups[0]["lr"] = rate * module.lr_scale(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack([loss.detach() for loss in seen]).mean()))
    return losses, dict(net.state_dict())


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("letters_of_peers", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_same(seen: Seen, folder: Path, bundle: Path, steps: int = STEPS) -> None:
    """Compare losses and all tensors of all replicas with plain PyTorch's."""
    losses, expected = plain(bundle, steps)
    assert seen.losses == losses
    held = [load_file(path) for path in sorted((folder / "bundle" / "out").glob("*.safetensors"))]
    assert {name for each in held for name in each} == set(expected)
    for each in held:
        for name, tensor in each.items():
            assert torch.equal(tensor, expected[name]), name


def struck(folder: Path, bundle: Path, devices: int, faults: list[Fault], *words: str) -> Seen:
    """Run with faults; the bits are plain PyTorch's, and nobody took a snapshot."""
    seen = supervised(bundle, folder, named(devices), STEPS, faults, every=None, more_words=words)
    assert len(seen.struck) == len(faults)
    assert not seen.of("snapshot")
    require_same(seen, folder, bundle)
    return seen


def test_a_dead_replica_has_its_state_from_the_other(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (("d0",), ("d1",)))
    seen = struck(tmp_path / "run", bundle, 2, [Fault("d1", 2, 5)])
    (took,) = seen.of("took_state")
    assert (took["device"], took["step"], took["peers"]) == ("d1", 2, "d0")
    (assigned,) = seen.of("assigned")
    assert assigned["step"] == 2


@pytest.mark.nightly
def test_states_come_from_peers_that_are_cut_otherwise(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", UNLIKE)
    faults = [Fault("d3", 1, 3), Fault("d1", 3, "updated"), Fault("d4", 5, "end")]
    seen = struck(tmp_path / "run", bundle, 5, faults)
    took = [(event["device"], event["step"]) for event in seen.of("took_state")]
    assert took == [("d3", 1), ("d1", 4), ("d4", 6)]
    assert [event["peers"] for event in seen.of("took_state")] == ["d0, d1", "d3, d4", "d2, d1"]


@pytest.mark.nightly
def test_another_gives_where_a_peer_dies_while_it_gives(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (("d0",), ("d1",), ("d2",)))
    seen = struck(tmp_path / "run", bundle, 3, [Fault("d2", 2, 1), Fault("d0", 1, "giving")])
    assert [event["device"] for event in seen.of("died")] == ["d2", "d0"]
    assert {event["peers"] for event in seen.of("took_state")} == {"d1"}


@pytest.mark.nightly
@pytest.mark.parametrize("commits", [False, True])
def test_all_begin_again_where_the_only_peer_dies_too(tmp_path: Path, commits: bool) -> None:
    bundle = split(tmp_path / "made", (("d0",), ("d1",)))
    folder = tmp_path / "commits"
    words = ["--checkpoint-dir", str(folder), "--checkpoint-every", "2"] if commits else []
    written = str(folder / "commit-2.json") if commits else ""
    faults = [Fault("d0", 3, 2, awaits=written), Fault("d1", 1, "giving"), Fault("d1", 4, 2)]
    seen = struck(tmp_path / "run", bundle, 2, faults, *words)
    assert len(seen.of("state_lost")) == 1
    (back,) = seen.of("rolled_back")
    assert back["step"] == (2 if commits else 0)
    assert [event["device"] for event in seen.of("took_state")] == ["d1"]


@pytest.mark.nightly
def test_no_place_of_a_step_is_a_bad_one(tmp_path: Path) -> None:
    """Also that between a stage's last gradients of weights and of what it received.

    Running statistics are written before the update, and given as they were.
    """
    norms = MODEL.replace("nn.LayerNorm(16)", "nn.BatchNorm1d(5)")  # over letters
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), norms)
    places: list[tuple[str, int | str]] = [
        ("d1", 0),
        ("d3", 4),
        ("d2", 7),
        ("d1", 9),
        ("d3", 10),
        ("d1", 11),
        ("d0", 12),
    ]
    places += [("d3", 13), ("d1", "updated"), ("d2", "end"), ("d3", 14), ("d0", "updated")]
    faults = [Fault(name, step, at) for step, (name, at) in enumerate(places, 1)]
    steps = len(faults) + 2
    run = tmp_path / "run"
    seen = supervised(bundle, run, named(4), steps, faults, every=None)
    assert len(seen.struck) == len(faults)
    assert [event["steps"] for event in seen.of("caught_up")] == [0] * len(faults)
    require_same(seen, run, bundle, steps)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("device", ["d1", "d3"])
def test_no_place_around_the_last_gradient_is_a_bad_one(
    tmp_path: Path, device: str, schedule: str
) -> None:
    """The last stage of a replica dies between its sums over replicas and its last gradient.

    A peer may have updated by then, and a neighbour may still wait: 54 places in all.
    """
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), schedule=schedule)
    places: list[int | str] = [*range(10, 17), "updated", "end"]
    faults = [Fault(device, step, at) for step, at in enumerate(places, 1)]
    run, steps = tmp_path / "run", len(places) + 2
    seen = supervised(bundle, run, named(4), steps, faults, every=None)
    assert len(seen.struck) == len(faults)
    assert not seen.of("snapshot")
    require_same(seen, run, bundle, steps)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_place_in_a_buckets_second_phase_is_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Its parts are added up, and the sums have not left, or one has, or the others' lack."""
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 256)
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), schedule=schedule)
    buckets = json.loads((bundle / "buckets.json").read_text()).values()
    ends = [tuple(bucket["stages"]) for bucket in buckets]
    assert min(ends.count(stages) for stages in ends) > 1  # so that one may have left
    places = [(d, at) for d in ("d3", "d0") for at in ("summed", "half summed", "gathering")]
    faults = [Fault(device, step, at) for step, (device, at) in enumerate(places, 1)]
    run, steps = tmp_path / "run", len(places) + 2
    seen = supervised(bundle, run, named(4), steps, faults, every=None)
    assert len(seen.struck) == len(faults)
    assert [event["device"] for event in seen.of("took_state")] == [d for d, _ in places]
    assert not seen.of("snapshot")
    require_same(seen, run, bundle, steps)
