"""Memory of a bundle's processes: live tensor bytes, or resident memory.

Both are taken in the process of each device while it runs the bundle's own train.py, from the
second step on: by then the optimizer's state is there. The two need runs of their own, since
counting tensors takes memory, too. What the user's own `batches` holds is left out of the first.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bigbrain_fx.bundles.launch import Command, Process, RunOptions, Spawn, popen, run
from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.plan import Plan, read_plan
from tools.conformance.forked import fork

ROOT = Path(__file__).resolve().parents[2]
STEADY = 1  # the first step that counts
STEPS = 3
DEADLINE_S = 300.0  # an emulated device that counts is slow


@dataclass
class _Meter:
    """Read something at the start of the first steady step, and after each step."""

    start: Callable[[], object]
    read: Callable[[], int]
    path: Path

    def install(self) -> None:
        """Wrap the runtime's `Device.run_step`; the bundle's own copy of it."""
        device = importlib.import_module("runtime").Device
        run_step = device.run_step

        def metered(this: object, step: int) -> object:
            if step == STEADY:
                self.start()
            found = run_step(this, step)
            if step >= STEADY:
                self.path.write_text(json.dumps(self.read()))
            return found

        device.run_step = metered


def tracked_bytes(bundle: Path, scratch: Path, spawn: Spawn | None = None) -> Mapping[str, int]:
    """Return the peak of live tensor bytes of each device's process.

    Args:
        bundle: to run.
        scratch: a folder for logs and results.
        spawn: starts a process on a device; None: a fork of this one.
    """
    if spawn is None:
        return _measured(
            bundle, scratch, partial(fork, before=partial(_track_forked, scratch.resolve()))
        )
    return _measured(bundle, scratch, lambda command: spawn(_as_us("track", scratch, command)))


def resident_bytes(bundle: Path, scratch: Path) -> Mapping[str, int]:
    """Return VmHWM of each device's process, less what a warmed process without a model holds."""
    return _measured(bundle, scratch, partial(_popen_watched, scratch.resolve()))


def _measured(bundle: Path, scratch: Path, spawn: Spawn) -> Mapping[str, int]:
    plan: Plan = read_plan(bundle)
    scratch.mkdir(parents=True, exist_ok=True)
    options = RunOptions(STEPS, deadline_s=DEADLINE_S, threads=1, logs=scratch / "logs")
    run(bundle, options, spawn=spawn)
    devices = plan.stages.devices
    return {name: int(json.loads((scratch / f"{name}.bytes").read_text())) for name in devices}


def _track_forked(scratch: Path, command: Command) -> None:
    _track(scratch / f"{command.device}.bytes")


def _track(path: Path) -> None:
    """Write the peak of live tensor bytes."""
    live = LiveBytes()
    live.__enter__()  # type: ignore[no-untyped-call]  # to the end of the process
    _leave_out_own_data(live)
    _count_resizing(live)
    _leave_out_stores(live)
    _count_visits(live)
    _Meter(live.reset_peak, lambda: live.peak, path).install()


def _count_resizing(live: LiveBytes) -> None:
    """Count what `resize_` of a storage takes and gives: weights that are gathered and let go."""
    resize = torch.UntypedStorage.resize_

    def resizing(storage: Any, nbytes: int) -> Any:  # noqa: ANN401  # as torch has it
        before = storage.nbytes()
        found = resize(storage, nbytes)
        live.resized(storage, storage.nbytes() - before)
        return found

    patched: Any = torch.UntypedStorage
    patched.resize_ = resizing


def _leave_out_own_data(live: LiveBytes) -> None:
    """Do not count what the user's `batches` makes and holds: nobody can foresee that.

    What the bundle makes of it, its micro-batches, is counted.
    """
    stream = importlib.import_module("runtime.stream").BatchStream
    build = stream.__init__

    def building(this: Any, batches: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        build(this, partial(_uncounted, live, batches), *args, **kwargs)

    stream.__init__ = building


def _leave_out_stores(live: LiveBytes) -> None:
    """Do not count what lies in a store: its tensors are pages of a file."""
    if not Path("runtime/stores.py").exists():  # a bundle has it that offloads
        return
    room = importlib.import_module("runtime.stores").DiskRoom
    take = room.take

    def taking(this: Any, nbytes: int) -> torch.Tensor:  # noqa: ANN401
        found: torch.Tensor = take(this, nbytes)
        live.ignore((found,))
        return found

    room.take = taking


def _count_visits(live: LiveBytes) -> None:
    """Count a stage's weights from a store while it runs: pages of a file, but in memory."""
    if not Path("runtime/stored_weights.py").exists():  # a bundle has it that offloads them
        return
    stored = importlib.import_module("runtime.stored_weights").StoredWeights
    visit = stored.visit

    def visiting(this: Any, stage: int | None, sums: Any) -> None:  # noqa: ANN401
        before = 0 if this.here is None else sum(t.nbytes for t in this.weights_of(this.here))
        visit(this, stage, sums)
        after = 0 if stage is None else sum(t.nbytes for t in this.weights_of(stage))
        live.taken(after - before)

    stored.visit = visiting


def _uncounted(
    live: LiveBytes, batches: Callable[[int], Iterator[object]], seed: int
) -> Iterator[object]:
    with _disable_current_modes():
        made = iter(batches(seed))
    while True:
        with _disable_current_modes():
            batch = next(made, None)
        if batch is None:
            return
        live.ignore(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        yield batch


def _popen_watched(scratch: Path, command: Command) -> Process:
    """Start a device's process as this module, which watches it run the program.

    A fork would not do: it would reuse what its parent has freed.
    """
    return popen(_as_us("watch", scratch, command))


def _as_us(how: str, scratch: Path, command: Command) -> Command:
    """Return the command that runs this module, which runs the program."""
    words = (
        sys.executable,
        "-m",
        "tools.conformance.live_bytes",
        how,
        str(scratch.resolve()),
        command.device,
    )
    environment = {**command.environment, "PYTHONPATH": str(ROOT)}
    return replace(command, words=(*words, *command.words[1:]), environment=environment)


def _be(how: str, scratch: str, device: str, program: str, *arguments: str) -> None:
    """Be a device's process: track live tensors, or watch resident memory."""
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    path = Path(scratch, f"{device}.bytes")
    _watch(path) if how == "watch" else _track(path)
    runpy.run_path(program, run_name="__main__")


def _watch(path: Path) -> None:
    """Write what the process takes beyond a warmed one without a model."""
    _warm_up()
    importlib.import_module("runtime.malloc").keep_freed_memory()
    baseline = _status("VmRSS")
    _Meter(lambda: None, lambda: _status("VmHWM") - baseline, path).install()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew


def _status(field: str) -> int:
    """Return a size of this process in bytes, as Linux says it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _warm_up() -> None:
    """Run one small step of everything, so that code and tables are loaded."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(1))
    head = nn.Sequential(nn.Linear(8 * 36, 16), nn.LayerNorm(16), nn.Dropout(0.1))
    params = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params)
    made = head(net(torch.randn(2, 3, 8, 8)))
    heads = made.view(2, 1, 4, 4)
    mixed = F.scaled_dot_product_attention(heads, heads, heads)
    F.cross_entropy(mixed.flatten(1), torch.zeros(2, dtype=torch.long)).backward()
    optimizer.step()


if __name__ == "__main__":
    _be(*sys.argv[1:])
