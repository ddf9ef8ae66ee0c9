"""A bundle and the folder of its commits -> the newest whole one, as a state of the whole model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bigbrain_fx.bundles.resplitting.named import Named, read_members
from bigbrain_fx.bundles.resplitting.parts import whole_state
from bigbrain_fx.errors import os_error_as
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import graph_hash
from bigbrain_fx.weights import scratch_folder


@contextmanager
def newest_state(
    plan: Plan, bundle: Path, commits: Path, beside: Path
) -> Iterator[tuple[Named, list[str]]]:
    """Give the newest commit that is whole on all devices, and what to say of newer ones.

    Args:
        plan: of the bundle.
        bundle: whose run it is.
        commits: the folder.
        beside: what is written with it: parts of tensors are put together on the same disk.

    Raises:
        InputError: there is none, or it is of another plan; or the disk is full.
    """
    text = (bundle / "plan.json").read_bytes()
    expected = {"plan": hashlib.sha256(text).hexdigest()[:16], "graph": graph_hash(text)}
    states, notes = read_members(commits, _columns(plan), expected)
    if len(states) == 1:
        yield states[0], notes
        return
    with scratch_beside(beside) as scratch:
        yield whole_state(states, plan, scratch / "state.safetensors"), notes


def _columns(plan: Plan) -> list[list[str]]:
    """Return the devices of each rank of the tensor groups; without groups, all devices."""
    member = {stage.device: stage.member for stage in plan.stages.stages}
    every = range(plan.stages.members)
    return [[name for name in plan.stages.devices if member[name] == m] for m in every]


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Give a folder on the disk that something is to be on, for as long as it is needed."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    with ExitStack() as stack:
        with os_error_as(
            f"cannot write {target}", code="BX3103", at=target, help="give another place"
        ):
            folder = stack.enter_context(scratch_folder(there / "state"))
        yield folder
