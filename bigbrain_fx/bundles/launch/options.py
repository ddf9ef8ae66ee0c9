"""How to run a bundle, and what a run tells: its steps or batches as they are done, and the whole.

Only nouns: nothing here starts anything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigbrain_fx.core import Shown

Backend = Literal["gloo", "nccl"]
DEFAULT_STEPS = 10  # train.py's and infer.py's own


@dataclass(frozen=True)
class StepLine:
    """Report of one training step: loss is the mean over micro-batches, step_s wall seconds."""

    step: int
    loss: float
    step_s: float


@dataclass(frozen=True)
class BatchLine:
    """Report of one batch of inference: its rows, batch_s wall seconds."""

    batch: int
    rows: int
    batch_s: float


Line = StepLine | BatchLine


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A finished run: steps of training, or batches of inference.

    `max_rss_bytes` is the largest resident memory of each device's process; `logs` is the folder of
    what each printed. `restarts` counts processes that were replaced; `stopped_at` is the step
    before which SIGTERM stopped the training, None if it finished. `max_allocated_bytes` is the
    most that tensors took of each GPU (`torch.cuda.max_memory_allocated`).
    """

    steps: tuple[StepLine, ...]
    max_rss_bytes: dict[str, int]
    logs: Path
    batches: tuple[BatchLine, ...] = ()
    restarts: int = 0
    stopped_at: int | None = None
    max_allocated_bytes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Show how many steps, how they went, and what each device held."""
        steps, pace = self.steps or self.batches, ""
        if self.median_s:
            pace = f", median {self.median_s:.4f} s"
        loss = f", loss {self.steps[0].loss:.4f} -> {self.steps[-1].loss:.4f}" if self.steps else ""
        what = "steps" if self.steps else "batches"
        held = [f"  {n}: {size / 2**20:.0f} MiB resident" for n, size in self.max_rss_bytes.items()]
        return "\n".join([f"{len(steps)} {what}{loss}{pace}", *held, f"  logs in {self.logs}"])

    @property
    def median_s(self) -> float | None:
        """Seconds of a step, or batch; the first does not count. None: there was no second one."""
        taken = [line.step_s for line in self.steps] or [line.batch_s for line in self.batches]
        return statistics.median(taken[1:]) if len(taken) > 1 else None


@dataclass(frozen=True)
class RunOptions:
    """How to run: see `bigbrain-fx run --help`.

    `steps` None: 10, or for inference all rows of `inputs`. `save` and `first_gradients` are for
    training, `inputs` and `outputs` for inference.

    `spares` not None: one of so many standby workers replaces a process of a training that dies,
    and the result is the same. `restarts` of them are allowed within ten minutes. A process without
    progress for `hang_s` is ended. A run that is asked to stop waits `grace_s` for the end of a
    step. None: three times the longest recent one, at least `hang_s` and 30 s. `snapshot_every`
    steps lie between snapshots in memory; None: measured. With `snapshots` they lie in that folder
    of a disk (None: there, where a bundle's state lies in such a store). Events are appended to
    `events` as JSON lines. A standby worker recomputes the share `suspect` of all devices' steps,
    and all go back where it finds another result. `log_mib` of sent messages are kept on each
    device; None: its share of half of the free memory.

    `log_to` are files (name.csv) that take loss, seconds and rows a second of each training step.
    On the port `metrics` of the loopback interface Prometheus is answered.

    `trace` is a file for a Chrome trace (Perfetto) of what the devices did beside the forecast. The
    bundle's report.html shows a typical step of it, too.

    `on_nan`: at a loss or gradient that is not finite "stop" (the default), "skip" the update on
    all devices, or "ignore" it.

    `backend` carries the messages of a training between GPUs: "gloo" through host memory, where a
    process that dies is replaced, or "nccl". None: nccl where all devices are GPUs, else gloo.

    A message is waited for `deadline_s`; None: 300 s, 1800 where stages are compiled meanwhile.

    `store` is a folder for what the plan offloads, in place of the folders that it names.

    `commits` is a folder on a disk to which the state is written every `commit_every` steps, at the
    start and at the end. The newest `keep` of them stay (None: two, or as before). With `resume` a
    training goes on from the last commit there.
    """

    steps: int | None = None
    seed: int | None = None
    port: int = 0
    deadline_s: float | None = None
    save: Path | None = None
    first_gradients: Path | None = None
    threads: int | None = None
    logs: Path | None = None
    inputs: Path | None = None
    outputs: Path | None = None
    spares: int | None = None
    restarts: int = 20
    hang_s: float = 60.0
    grace_s: float | None = None
    snapshot_every: int | None = None
    snapshots: Path | None = None
    suspect: float | None = None
    events: Path | None = None
    commits: Path | None = None
    commit_every: int | None = None
    keep: int | None = None
    resume: bool = False
    log_mib: int | None = None
    on_nan: str | None = None
    backend: Backend | None = None
    store: Path | None = None
    log_to: tuple[Path, ...] = ()
    metrics: int | None = None
    trace: Path | None = None

    def flags(self, *names: str) -> list[str]:
        """Return the words of a command line for these fields; those that are None say nothing."""
        given = {name: getattr(self, name) for name in names}
        return [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.removesuffix('_s').replace('_', '-')}", str(value))
        ]
