"""Steps that overlap have the bits of their recurrence, written as a loop of plain PyTorch."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.emit import write_bundle
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime.optimizer_state import OLDER
from tests.support.bundles import MODEL
from tests.support.stale_weights import Stale, behind_of
from tests.support.states import kept_state
from tests.support.training import bench_of, equal, planned, untied
from tools.conformance.matrix import Bench, imported

STEPS, MICRO = 5, 4
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench() -> Bench:
    return bench_of(untied(MODEL))


@pytest.fixture
def dry() -> Bench:
    """The same without dropout: a plain loop draws otherwise."""
    return bench_of(untied(MODEL).replace("Dropout(0.1)", "Dropout(0.0)"))


def overlapping(bench: Bench, devices: int, mode: str, **more: object) -> Plan:
    given: Any = {"micro_batches": MICRO, "asynchronous": mode, **more}
    return planned(bench, equal(devices), **given)


# --------------------------------------------------------------------------- a plain loop


def plain_loop(bench: Bench, plan: Plan, first: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train by the recurrence, as `tools.studies.asynchronous` does."""
    file: Any = bench.file
    model: nn.Module = file.model
    model.load_state_dict(first)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    stage_of = {name: s.index for s in plan.stages.stages for name in s.params}
    mode = str(plan.stages.asynchronous)
    behind = behind_of(mode, stage_of)
    loop = Stale(model, file.loss, optimizer, "letters", behind, mode == "stash")
    batches = file.batches(plan.seed)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * file.lr_scale(step)
        batch = next(batches)
        loop.step([{k: v.chunk(MICRO)[m] for k, v in batch.items()} for m in range(MICRO)])
    return copied(model)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def state_of_all(devices: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t.clone() for d in devices.values() for n, t in d.state().items()}


def run(bundle: ModuleType, steps: int, **more: object) -> dict[str, Any]:
    runtime: Any = importlib.import_module("runtime.train")
    found: dict[str, Any] = runtime.run_in_process(bundle.BUNDLE, steps, 0, **more)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "mode"), [pytest.param(3, "2bw", marks=pytest.mark.nightly), (4, "stash")]
)
def test_a_plain_loop_of_the_recurrence_has_the_same_bits(
    dry: Bench, devices: int, mode: str, tmp_path: Path
) -> None:
    plan = overlapping(dry, devices, mode)
    folder, first = write_bundle(plan, dry, tmp_path / "bundle"), copied(dry.file.model)
    with imported(folder, force_adamw=False) as bundle:
        overlapped: list[bool] = []
        held: dict[str, set[int]] = {}

        def at_end(device: Any, _step: int) -> None:
            overlapped.append(device.goes_on)
            held.setdefault(device.name, set()).add(len(device.versions.held))

        bundle.BUNDLE.hooks.on_step_end.append(at_end)
        found = state_of_all(run(bundle, STEPS))
    assert overlapped.count(True) == devices * (STEPS - 1)
    for stage in plan.stages.stages:
        most = 2 if mode == "2bw" else devices - stage.index
        assert max(held[stage.device]) == plan.stages.versions(stage.index) == most
    expected = plain_loop(dry, plan, first)
    dry.file.model.load_state_dict(first)
    assert {n for n, w in expected.items() if not torch.equal(found[n], w)} == set()
    moved = [n for n, w in expected.items() if not torch.equal(first[n], w)]
    assert len(moved) == len(expected)


# --------------------------------------------------------------------------- states and policies


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["2bw", pytest.param("stash", marks=pytest.mark.nightly)])
def test_a_run_that_goes_on_from_a_commit_has_the_same_bits(
    bench: Bench, mode: str, tmp_path: Path
) -> None:
    plan = overlapping(bench, 3, mode)
    folder = write_bundle(plan, bench, tmp_path / "bundle")
    with imported(folder, force_adamw=False) as bundle:
        options = importlib.import_module("runtime.checkpoint_options").CheckpointOptions
        whole = state_of_all(run(bundle, 6))
        run(bundle, 3, commits=options(tmp_path / "commits", every=2))
        again = options(tmp_path / "commits", every=2, resume=True)
        resumed = run(bundle, 6, commits=again)
        state = importlib.import_module("runtime.state")
        kept = kept_state(state.state_of(resumed["d0"]))
        older = [name for name in kept.tensors if name.startswith(OLDER)]
        assert len(older) == (plan.stages.versions(0) - 1) * len(resumed["d0"].parameters)
        lacking = {n: t for n, t in kept.tensors.items() if n != older[0]}
        with pytest.raises(state.StateError, match="the state lacks older_1"):
            state.restore(resumed["d0"], replace(kept, tensors=lacking))
    found = state_of_all(resumed)
    assert {name for name, t in whole.items() if not torch.equal(found[name], t)} == set()


def test_a_step_that_has_begun_the_next_has_no_state(bench: Bench, tmp_path: Path) -> None:
    folder = write_bundle(overlapping(bench, 2, "2bw"), bench, tmp_path / "bundle")
    with imported(folder, force_adamw=False) as bundle:
        state = importlib.import_module("runtime.state")

        def after(device: Any, step: int) -> None:
            if device.name == "d0" and step == 0:
                state.state_of(device)

        with pytest.raises(state.StateError, match="within a step"):
            run(bundle, 2, after_step=after)


@pytest.mark.nightly
def test_a_policy_that_asks_all_devices_is_refused(bench: Bench, tmp_path: Path) -> None:
    folder = write_bundle(overlapping(bench, 2, "2bw"), bench, tmp_path / "bundle")
    with imported(folder, force_adamw=False) as bundle:
        runtime = importlib.import_module("runtime.asynchronous")
        with pytest.raises(runtime.VersionError, match="--on-nan skip asks all devices"):
            run(bundle, 1, on_nan="skip")
