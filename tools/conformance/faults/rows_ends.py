"""Rows 25-30: a death as the run is asked to stop, a silent host, nobody who reads, orphans."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.supervisor import how_to_make
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import Live, Run, launch_words, run_job
from tools.conformance.faults.rows_disks import needs_root
from tools.conformance.faults.rows_processes import HANG_S
from tools.conformance.faults.rows_runs import resumed
from tools.conformance.faults.verdicts import (
    DEADLINE_S,
    STEPS,
    Ground,
    Verdict,
    judged,
    stopped,
    together,
)

GRACE_S = 30.0
PAUSES_S = (0.0, 0.005, 0.02)
SILENCE_MORE_S = 5.0
ADDRESSES, PORT = ("10.77.13.1", "10.77.13.2"), 29417
STOPPED_S = 2.0 * HANG_S
LONG = 100  # steps whose lines fill a pipe of one page
# A pipe of one page that nobody reads, and one whose reader has gone.
PIPE = "import fcntl, os, subprocess, sys\nread, write = os.pipe()\n"
UNREAD = f"{PIPE}fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)\n"
GONE = f"{PIPE}os.close(read)\n"
RUN_IT = "sys.exit(subprocess.run(sys.argv[1:], stdout=write).returncode)"


# --------------------------------------------------------------------------- a death and SIGTERM


def asked_with_a_death(ground: Ground) -> Verdict:
    """Row 25: SIGKILL to a device and SIGTERM to the run, at once or shortly apart."""
    found = [_together(ground, pause_s, first) for pause_s in PAUSES_S for first in (True, False)]
    return together(found, "six times: step ended, committed, exit 0; resumed alike")


def _together(ground: Ground, pause_s: float, kill_first: bool) -> Verdict:
    commits = ground.folder / f"both-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "1000")

    def strike(live: Live) -> None:
        live.facts["at"] = live.wait_struck(0)
        blows = [(live.pid("d1"), signal.SIGKILL), (live.process.pid, signal.SIGTERM)]
        for number, (pid, what) in enumerate(blows if kill_first else reversed(blows)):
            time.sleep(pause_s * number)  # it is what is tried
            os.kill(pid, what)

    faults = [Fault("d2", 5, "forward", 1, "sleep", seconds=0.5, spares=1)]
    run = ground.run(faults, *words, spares=1, during=strike)
    newest = [record.step for record in CheckpointStore(commits).records()]
    checks = {
        f"exit code {run.code}: {run.said[-300:]}": run.code == 0,
        f"commits of steps {newest}": bool(newest) and 5 < newest[0] < STEPS,
    }
    stop = stopped(run, "", checks, run.ended_s - run.facts["at"], GRACE_S)
    return together((stop, resumed(ground, *words)), "")


# --------------------------------------------------------------------------- a silent host


def silent_host(ground: Ground) -> Verdict:
    """Row 26: two hosts (namespaces); the link between them goes down, and nobody is told."""
    refused = needs_root()
    if refused is not None:
        return refused
    commits = ground.folder / f"silent-{ground.count}"
    words = ("--commits", str(commits), "--commit-every", "2")
    with two_hosts() as (near, far, link):
        down = ("ip", "link", "set", link, "down")
        folder = ground.fresh([Fault("d1", 5, "forward", 1, "run", words=down)])
        run = over_two(folder, (near, far), "--snapshot-every", "2", *words)
    at = run.struck.get(0)
    agent_s = run.facts["agent_ended_s"] - at if at else None
    newest = [record.step for record in CheckpointStore(commits).records()]
    checks = {
        f"exit code {run.code}": run.code == 1,
        "the head does not say so": "its host is lost" in run.said,
        f"exit code {run.facts['agent']} of the agent": run.facts["agent"] == 1,
        f"commits of steps {newest}": bool(newest) and newest[0] >= 2,
    }
    ends = [run.ended_s - at if at else None, agent_s]
    late_s = None if None in ends else max(e for e in ends if e is not None)
    stop = stopped(run, "", checks, late_s, HANG_S + SILENCE_MORE_S)
    outcome = f"both ends notice within T_hang = {HANG_S:g} s + 5 s; resumed, nothing differs"
    return together((stop, resumed(ground, *words)), outcome)


def over_two(folder: Path, spaces: Sequence[str], *words: str) -> Run:
    """Run a bundle of four devices over two namespaces to the end of both supervisors."""
    program, secret = folder / "bundle" / "launch.py", folder / "secret"
    text = program.read_text()
    program.write_text(text.replace(', "train.py"', ', "train.py", ("a", "a", "b", "b")'))
    subprocess.run(("sh", "-c", how_to_make(str(secret))), check=True, timeout=30)
    place = f"{ADDRESSES[0]}:{PORT}"
    common = ("--secret", str(secret), "--spares", "0")
    join = ("launch.py", "--join", place, "--host", "b", *common, "--logs", "../logs-b")
    enter = [("ip", "netns", "exec", name) for name in spaces]
    with ExitStack() as stack:
        said = stack.enter_context((folder / "agent.txt").open("wb"))
        agent = subprocess.Popen(
            (*enter[1], sys.executable, *join),
            cwd=folder / "bundle",
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        stack.callback(_ended, agent)

        def wait(live: Live) -> None:
            live.wait_struck(0)
            live.facts["agent"] = agent.wait(DEADLINE_S)
            live.facts["agent_ended_s"] = time.time()

        more = ("--secret", str(secret), "--listen", place, *words)
        head = launch_words(STEPS, *more, spares=0, hang_s=HANG_S)
        return run_job(folder, (*enter[0], *head), DEADLINE_S, wait)


def _ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(DEADLINE_S)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """Two namespaces with a link between them; give their names, and the link's at the first."""
    names = [f"bigbrain-{os.getpid()}-{end}" for end in "ab"]
    links = [f"bb{os.getpid() % 100_000}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1], links[0]
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=30, capture_output=True)


# --------------------------------------------------------------------------- nobody reads


def nobody_reads(ground: Ground) -> Verdict:
    """Row 27: stdout is a pipe whose reader is gone, or stopped; events go to a full disk."""
    gone = ground.run([], prefix=(sys.executable, "-c", GONE + RUN_IT))
    full = ground.run([], "--events", "/dev/full")
    more = [] if "events are lost, the run goes on" in full.said else ["no word of lost events"]
    reference = ground.reference(LONG)
    unread = ground.run([], prefix=(sys.executable, "-c", UNREAD + RUN_IT), steps=LONG)
    found = (
        judged(gone, ground.reference(), (), ""),
        judged(full, ground.reference(), (), "", more=more),
        judged(unread, reference, (), ""),
    )
    return together(found, "pipe closed, pipe full, events' disk full: nothing differs")


# --------------------------------------------------------------------------- what is left behind


def own_children(ground: Ground) -> Verdict:
    """Row 28: a device starts a process of its own, and dies."""
    child = ("sh", "-c", "sleep 1000 & echo $! > faults/child.pid")
    faults = [
        Fault("d1", 3, "forward", 0, "run", words=child),
        Fault("d1", 3, "forward", 2, after=0),
    ]
    seen: list[int] = []

    def look(live: Live) -> None:
        live.wait_struck(1)
        seen.append(int((live.faults / "child.pid").read_text()))
        live.wait_event("assigned")

    run = ground.run(faults, spares=0, during=look)
    left = [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    more = [f"its child {left} is still there"] if left else []
    return judged(run, ground.reference(), faults, "replaced; its child has ended", more=more)


def logs_removed(ground: Ground) -> Verdict:
    """Row 29: the folder of the logs is removed, and a device dies."""

    def sweep(live: Live) -> None:
        live.wait_struck(0)
        shutil.rmtree(live.folder / "logs")

    faults = [
        Fault("d1", 3, "forward", 0, "sleep", seconds=0.5),
        Fault("d1", 3, "forward", 2, after=0),
    ]
    run = ground.run(faults, spares=0, during=sweep)
    return judged(run, ground.reference(), faults, "made anew; replaced")


# --------------------------------------------------------------------------- a stopped supervisor


def supervisor_stopped(ground: Ground) -> Verdict:
    """Row 30: the supervisor is stopped for longer than T_hang, as by Ctrl-Z, and goes on."""
    found = [_stopped(ground, step) for step in (0, 5)]
    return together(found, "nobody was ended, nothing differs")


def _stopped(ground: Ground, step: int) -> Verdict:
    def stop(live: Live) -> None:
        live.wait_struck(0)
        os.kill(live.process.pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)  # it is what is tried
        finally:
            os.kill(live.process.pid, signal.SIGCONT)

    faults = [Fault("d1", step, "forward", 0, "mark")]
    run = ground.run(faults, hang_s=HANG_S, during=stop)
    ended = [event["event"] for event in run.events if event["event"] in ("hang", "died")]
    more = [f"events {ended}"] if ended else []
    return judged(run, ground.reference(), faults, "", more=more)
