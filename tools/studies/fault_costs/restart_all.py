"""Kill one process of a bundle under torchrun: all are started again, from the last commit.

    python -m tools.studies.fault_costs.restart_all BUNDLE --steps 12 --kill-after 5
        --commit-every 2 [--json]

It measures what a supervisor with spares is compared with: from the SIGKILL to the first step that
is run again and to the step that was reached, and whether the final tensors are the same bit for
bit as those of a run where nothing happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime import CheckpointStore

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """What one kill cost; seconds are from the SIGKILL.

    `steps_again` were run twice; `same_bits` compares the SHA-256 of every tensor at the end.
    """

    devices: int
    killed_after_step: int
    first_step_s: float
    caught_up_s: float
    steps_again: int
    same_bits: bool


def restart_all(bundle: Path, steps: int, kill_after: int, commit_every: int) -> Outcome:
    """Run a bundle twice: in peace, and with one process killed after a step.

    Raises:
        RuntimeError: a run failed, or nobody was killed.
    """
    bundle = bundle.resolve()
    count = len(read_plan(bundle).stages.devices)
    with tempfile.TemporaryDirectory(prefix="restart-all-") as name:
        folder = Path(name)
        _run(_train(steps, commit_every, folder / "peace", "--in-process"), bundle)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        options = (
            "--monitor-interval",
            "0.1",
            "--max-restarts",
            "1",
            "--nproc-per-node",
            str(count),
        )
        words = (*torchrun, *options, *_train(steps, commit_every, folder / "killed")[1:])
        times, killed_s = _run(words, bundle, kill_after)
        first = next(step for step, at in times if at > killed_s)
        caught_up_s = next(at for step, at in times if at > killed_s and step > kill_after)
        return Outcome(
            count,
            kill_after,
            next(at for _, at in times if at > killed_s) - killed_s,
            caught_up_s - killed_s,
            kill_after + 1 - first,
            _checks(folder / "peace") == _checks(folder / "killed"),
        )


def _train(steps: int, every: int, commits: Path, *more: str) -> tuple[str, ...]:
    common = ("train.py", "--json", "--steps", str(steps), "--commits", str(commits))
    return (sys.executable, *common, "--commit-every", str(every), *more)


def _run(
    words: tuple[str, ...], folder: Path, kill_after: int | None = None
) -> tuple[list[tuple[int, float]], float]:
    """Run to the end; return (step, when) for each step reported, and when the kill was."""
    times: list[tuple[int, float]] = []
    killed_s = 0.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            times.append((int(json.loads(line)["step"]), time.monotonic()))
            if kill_after is not None and not killed_s and times[-1][0] >= kill_after:
                killed_s = time.monotonic()
                os.kill(_children(process.pid)[0], signal.SIGKILL)
        if process.wait(DEADLINE_S):
            raise RuntimeError(f"{words} ended with exit code {process.returncode}")
    if kill_after is not None and not killed_s:
        raise RuntimeError(f"the run ended before step {kill_after}")
    return times, killed_s


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _checks(folder: Path) -> dict[str, str]:
    store = CheckpointStore(folder)
    (record, *_) = store.records(print)
    found: dict[str, str] = {"step": str(record.step)}
    for device in record.devices:
        checked = store.load(record, device, {}, print).checks
        found.update({f"{device}: {name}": check for name, check in checked.items()})
    return found


def main() -> None:
    """Run it as asked on the command line; exit 1 when the bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-after", type=int, default=5)
    parser.add_argument("--commit-every", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = restart_all(given.bundle, given.steps, given.kill_after, given.commit_every)
    if given.json:
        print(json.dumps(asdict(found)))
    else:
        print(
            f"{found.devices} devices, one killed after step {found.killed_after_step}: the first "
            f"step again after {found.first_step_s:.1f} s, caught up after {found.caught_up_s:.1f} "
            f"s, {found.steps_again} steps run twice; "
            f"the same bits at the end: {'yes' if found.same_bits else 'NO'}"
        )
    sys.exit(0 if found.same_bits else 1)


if __name__ == "__main__":
    main()
