"""One table over peers: the same small training in the words of each, run here.

    python -m tools.studies.peers [--only ours --only ddp] [--rounds 16]

Of each script in `scripts`: how many lines are not those of plain PyTorch, processor
seconds until the first step, rows a processor second of the processes that compute, rows a second
on the wall, resident memory of all its processes, whether the losses are those of one process; and
what happens when the process of rank 1 is killed in the middle. Who is not installed is a row that
says so. With `--rounds` all train in turn, so often: rows a second are medians over the rounds in
which others used at most 5 % of the processors; without, of the one run.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from bigbrain_fx.bundles import free_port
from tools.studies.peers.bench_peer import QUIET
from tools.studies.peers.peer_jobs import Meter

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ROOT = SCRIPTS.parents[3]
STEPS, KILLED_AFTER = 72, 4
SETTLED = 40  # the first step that is timed: before it the spare process of ours still starts
ROWS = 8  # of a step, over all ranks; `peer_model.py` has them
BLOCKS, DIM = 4, 128  # of the GPT in `peer_model.py`: a step is short
DEADLINE_S = 900.0
BEGINS_S = 5.0
ROUNDING = 1e-4  # of a loss: sums in another order
_DEVICE = {"host": "localhost", "kind": "cpu", "memory": "8GiB", "flops": "60GFLOP/s"}
DEVICES = ("d0", "d1")  # a device's process logs to a file of its name
_DEVICES = [{**_DEVICE, "name": name, "memory_bandwidth": "12GB/s"} for name in DEVICES]
CLUSTER = {
    "devices": _DEVICES,
    "links": {"default": {"bandwidth": "2GB/s", "latency": "50us"}},
}


@dataclass(frozen=True)
class Peer:
    """Who trains: its script, the package it needs, and whether torchrun starts it."""

    name: str
    script: str
    package: str = "torch"
    by_torchrun: bool = True


PEERS = (
    Peer("plain PyTorch, one process", "plain", by_torchrun=False),
    Peer("bigbrain-fx, bb.machine", "ours", by_torchrun=False),
    Peer("bigbrain-fx, bb.machine, replicas allowed", "ours_in_replicas", by_torchrun=False),
    Peer("torch.distributed.pipelining, 1F1B", "pipelining"),
    Peer("DistributedDataParallel", "ddp"),
    Peer("FSDP2, fully_shard", "fsdp2"),
    Peer("accelerate", "with_accelerate", "accelerate"),
)


@dataclass(frozen=True)
class Trained:
    """One run: its losses by step, what it took, and how it ended.

    `others` is the share of the processors that other processes used while it trained.
    """

    losses: tuple[float, ...]
    first_cpu_s: float
    rows_per_cpu_s: float
    rows_per_s: float
    others: float
    memory_bytes: int
    code: int
    after_kill: int = 0
    killed: bool = False


@dataclass(frozen=True)
class PeerRow:
    """One peer of the table; `why` says why there are no figures."""

    peer: Peer
    lines: int
    quiet: Trained | None = None
    struck: Trained | None = None
    why: str = ""


# --------------------------------------------------------------------------- one run


def trained(peer: Peer, *, kill: bool = False) -> Trained:
    """Run a peer's script to its end; with `kill`, rank 1's process is killed in the middle."""
    losses: dict[int, dict[int, float]] = {}
    first_cpu_s, memory, struck_at, killed = 0.0, dict[int, int](), -1, False
    with _started(peer) as process:
        pace = Pace(process.pid)
        for rank, step, loss in _steps(process):
            first_cpu_s = first_cpu_s or _cpu_s(process.pid, *_tree(process.pid))
            pace.told(step)
            memory |= _memory(process.pid)
            losses.setdefault(step, {})[rank] = loss
            if kill and not killed and step == KILLED_AFTER:
                killed, struck_at = _kill_rank_1(process.pid), step
        code = process.wait(DEADLINE_S)
    means = [sum(found.values()) / len(found) for _, found in sorted(losses.items())]
    after = sum(step > struck_at for step in losses) if killed else 0
    paces = pace.rows_per(pace.cpu_s), pace.rows_per(pace.wall_s), pace.others
    return Trained(tuple(means), first_cpu_s, *paces, sum(memory.values()), code, after, killed)


class Pace:
    """What the steps take from the first one timed to the newest: processors, wall, and others."""

    def __init__(self, root: int) -> None:
        self.root, self.steps, self.cpu_s, self.wall_s, self.others = root, 0, 0.0, 0.0, 0.0
        self._begun: tuple[int, float, float, Meter] | None = None

    def told(self, step: int) -> None:
        """Take a line that names a step; several ranks may name the same."""
        if step < SETTLED:
            return
        now, cpu_s = time.monotonic(), _cpu_s(*_ranks(self.root).values())
        if self._begun is None:
            meter = Meter([self.root, *_tree(self.root)])
            self._begun = step, now, cpu_s, meter.__enter__()
        first, at, spent_s, meter = self._begun
        meter.__exit__()
        self.steps, self.wall_s, self.cpu_s = step - first, now - at, cpu_s - spent_s
        self.others = meter.others

    def rows_per(self, seconds: float) -> float:
        """Return rows per these seconds."""
        return ROWS * self.steps / max(seconds, 0.01)


@contextmanager
def _started(peer: Peer) -> Iterator[subprocess.Popen[str]]:
    """Start a script in a folder of its own; all its processes end with the block."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        (Path(folder) / "cluster.json").write_text(json.dumps(CLUSTER))
        words = [sys.executable, str(SCRIPTS / f"{peer.script}.py")]
        if peer.by_torchrun:
            run = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
            words[1:1] = [*run, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        more = {"PEER_STEPS": str(STEPS), "PEER_DIM": str(DIM), "PEER_BLOCKS": str(BLOCKS)}
        more |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env = {**os.environ, **more, "PYTHONPATH": str(ROOT)}
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            alarm = threading.Timer(DEADLINE_S, process.kill)
            alarm.start()
            try:
                yield process
            finally:
                alarm.cancel()
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    for pid in (*_tree(process.pid)[::-1], process.pid):
        if process.poll() is None or pid != process.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _steps(process: subprocess.Popen[str]) -> Iterator[tuple[int, int, float]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("STEP "):
            _, rank, step, loss = line.split()
            yield int(rank), int(step), float(loss)


# --------------------------------------------------------------------------- its processes


def _tree(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    found, seen = [pid], 0
    while seen < len(found):
        with suppress(OSError):
            for task in Path(f"/proc/{found[seen]}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        seen += 1
    return found[1:]


def _ranks(pid: int) -> dict[int, int]:
    """Return the processes that compute, by rank: those that are told a rank, or log as a device.

    A process alone computes itself.
    """
    found = {rank: each for each in _tree(pid) if (rank := _rank(each)) is not None}
    return found or {0: pid}


def _rank(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        told = next((word for word in words if word.startswith(b"RANK=")), None)
        if told is not None:
            return int(told.removeprefix(b"RANK="))
        return DEVICES.index(Path(os.readlink(f"/proc/{pid}/fd/1")).stem)
    return None


def _cpu_s(*pids: int) -> float:
    """Return processor seconds of some processes."""
    ticks = 0
    for each in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # own, and of children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> dict[int, int]:
    """Return the peak of resident memory of each process that computes."""
    found = {}
    for each in (pid, *_tree(pid)):
        with suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    found[each] = int(line.split()[1]) * 1024
    return found


def _kill_rank_1(pid: int) -> bool:
    """Kill it; a process that has just begun has no environment to read for a moment."""
    deadline = time.monotonic() + BEGINS_S
    while (struck := _ranks(pid).get(1)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(struck, signal.SIGKILL)
        return True
    return False


# --------------------------------------------------------------------------- the table


def lines_beside_plain(script: str) -> int:
    """Count the lines of code of a script that plain PyTorch has not."""
    ours, plain = (_code(SCRIPTS / f"{name}.py") for name in (script, "plain"))
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, ours))


def _code(path: Path) -> list[str]:
    text = path.read_text().split('"""', 2)[2]  # less what it says of itself
    return [line.strip() for line in text.splitlines() if line.strip()]


def in_turn(peers: Sequence[Peer], rounds: int) -> Mapping[str, Sequence[float]]:
    """Run all peers in turn, so often; return each one's rows a second in its quiet rounds."""
    found: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for number in range(rounds):
        for peer in peers:
            run = trained(peer)
            if run.others <= QUIET:
                found[peer.name].append(run.rows_per_s)
            message = f"round {number}: {peer.name} {run.rows_per_s:.1f}, others {run.others:.1%}"
            click.echo(message, err=True)
    return found


def spread(rates: Sequence[float]) -> str:
    """Return median and quartiles as a cell."""
    if len(rates) < 2:
        return "not measured"
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return f"{middle:.1f} ({low:.1f} to {high:.1f}; {len(rates)} runs)"


def measured(peer: Peer) -> PeerRow:
    """Run a peer twice: in peace, and with a process killed."""
    lines = lines_beside_plain(peer.script)
    if importlib.util.find_spec(peer.package) is None:
        return PeerRow(peer, lines, why=f"{peer.package} is not installed here")
    quiet = trained(peer)
    if len(quiet.losses) != STEPS or quiet.code:
        return PeerRow(peer, lines, quiet, why=f"ended with code {quiet.code}")
    return PeerRow(peer, lines, quiet, None if peer.script == "plain" else trained(peer, kill=True))


def told(
    row: PeerRow, plain: Sequence[float], rates: Sequence[float] | None = None
) -> Mapping[str, str]:
    """Return a row's cells; `rates` are rows a second of runs in turn."""
    quiet = row.quiet
    if quiet is None or row.why:
        return {"peer": row.peer.name, "lines": str(row.lines), "losses": row.why}
    off = max(abs(a - b) / abs(b) for a, b in zip(quiet.losses, plain, strict=True))
    same = "the bits" if off == 0 else f"to {off:.0e}"
    return {
        "peer": row.peer.name,
        "lines": str(row.lines),
        "cpu": f"{quiet.first_cpu_s:.1f} s",
        "pace": f"{quiet.rows_per_cpu_s:.1f}",
        "wall": f"{quiet.rows_per_s:.1f}" if rates is None else spread(rates),
        "memory": f"{quiet.memory_bytes / 2**20:.0f} MiB",
        "losses": same if off <= ROUNDING else f"OTHERS: {off:.1e} apart",
        "kill": _end_of(row.struck, quiet),
    }


def _end_of(struck: Trained | None, quiet: Trained) -> str:
    if struck is None:
        return "-"
    if not struck.killed:
        return "no process of rank 1 was found"
    if struck.code:
        return f"all end, code {struck.code}; {struck.after_kill} more steps"
    same = "the same losses" if struck.losses == quiet.losses else "other losses"
    return f"goes on: {struck.after_kill} more steps, {same}"


HEADS = {
    "peer": "peer",
    "lines": "lines beside plain PyTorch's",
    "cpu": "processor time to first step",
    "pace": "rows a processor second",
    "wall": "rows a second on the wall",
    "memory": "memory, all processes",
    "losses": "losses as one process",
    "kill": "rank 1 gets SIGKILL",
}


@click.command()
@click.option("--only", multiple=True, help="A name of `scripts`; plain always runs.")
@click.option("--rounds", default=0, help="Runs of each, in turn, for rows a second on the wall.")
def main(only: Sequence[str], rounds: int) -> None:
    """Run the rows and print the table as Markdown."""
    wanted = [p for p in PEERS if p.script == "plain" or not only or p.script in only]
    click.echo(f"| {' | '.join(HEADS.values())} |\n|{' --- |' * len(HEADS)}")
    start = time.monotonic()
    rows = [measured(peer) for peer in wanted]
    rates = in_turn([row.peer for row in rows if not row.why], rounds) if rounds else {}
    plain = next((row.quiet.losses for row in rows if row.quiet), ())
    for row in rows:
        cells = told(row, plain, rates.get(row.peer.name))
        click.echo(f"| {' | '.join(cells.get(key, '') for key in HEADS)} |")
    click.echo(f"\n{time.monotonic() - start:.0f} s in all", err=True)


if __name__ == "__main__":
    main()
