"""Rows 37 and 38: of two hosts with a replica each, one is lost, or cut off and still there.

Where the host whose supervisor decides is lost, the other one keeps a last commit.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from bigbrain_fx.runtime.checkpoint_store import ASIDE, CheckpointStore
from bigbrain_fx.supervisor import how_to_make
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import Live, Run, launch_words, run_job
from tools.conformance.faults.rows_disks import needs_root
from tools.conformance.faults.rows_ends import SILENCE_MORE_S, over_two, two_hosts
from tools.conformance.faults.rows_processes import HANG_S
from tools.conformance.faults.rows_replicas import replicated
from tools.conformance.faults.rows_runs import resumed
from tools.conformance.faults.verdicts import (
    DEADLINE_S,
    STEPS,
    Ground,
    Verdict,
    losses_differ,
    stopped,
    times_of,
    together,
)

BEHIND_S = 5.0  # the last commit, after the loss was noticed
KEPT_STEP = 5  # the device that strikes is within it: nobody has all of its messages


def head_lost(ground: Ground) -> Verdict:
    """Row 37: its supervisor is killed, or stopped, in a forward; each host has a replica."""
    here = replicated(ground)
    found = [_lost(here, signal.SIGKILL), _lost(here, signal.SIGSTOP)]
    outcome = "killed: the others commit that step; stopped: they set it aside; resumed alike"
    return together(found, outcome)


def _lost(here: Ground, blow: signal.Signals) -> Verdict:
    commits = here.folder / f"head-{here.count}"
    words = ("--commits", str(commits), "--commit-every", "2")
    run = _over_two(here, blow, words)
    said = (run.folder / "agent.txt").read_text()
    late_s = run.facts["agent_ended_s"] - run.facts["at"]
    aside = sorted(commits.glob(f"*{ASIDE}"))
    for path in aside:  # as the agent says
        path.rename(path.with_name(path.name.removesuffix(ASIDE)))
    newest = max((record.step for record in CheckpointStore(commits).records()), default=-1)
    checks = {
        f"exit code {run.facts['agent']} of the other: {said[-300:]}": run.facts["agent"] == 1,
        f"the newest commit is of step {newest}": newest == KEPT_STEP,
        f"it does not name the commit: {said[-300:]}": f"{commits}/commit-{KEPT_STEP}.json" in said,
        "a silent supervisor's commit counts": blow == signal.SIGKILL or len(aside) == 1,
    }
    bound_s = BEHIND_S + (HANG_S if blow == signal.SIGSTOP else 0.0)
    stop = stopped(run, "", checks, late_s, bound_s)
    return together((stop, resumed(here, *words)), "")


def cut_off(ground: Ground) -> Verdict:
    """Row 38: the link between two living hosts goes down in a forward, and nobody is told.

    The side of the supervisor that decides goes on with its replica; the other ends, and what it
    keeps is where no later run begins.
    """
    ground.require_without("going on without a replica", "offload")
    refused = needs_root()
    if refused is not None:
        return refused
    here = replicated(ground)
    commits = here.folder / f"cut-{here.count}"
    words = ("--elastic", "--commits", str(commits), "--commit-every", "2")
    with two_hosts() as (near, far, link):
        down = ("ip", "link", "set", link, "down")
        faults = [Fault("d1", KEPT_STEP, "forward", 1, "run", words=down)]
        run = over_two(here.fresh(faults), (near, far), *words)
    expected, (strike,) = here.reference(), times_of(run, faults)
    bits = run.hashes == {name: expected.hashes[name] for name in ("d0", "d1")}
    said = (run.folder / "agent.txt").read_text()
    records = [record.step for record in CheckpointStore(commits).records()]
    checks = {
        f"exit code {run.code}: {run.said[-300:]}": run.code == 0,
        f"exit code {run.facts['agent']} of the other: {said[-300:]}": run.facts["agent"] == 1,
        f"it does not say what it set aside: {said[-300:]}": ASIDE in said,
        "other bits at the end": bits,
        f"lost: {run.of('replica_lost')}": len(run.of("replica_lost")) == 1,
        f"commits of steps {records}": records[:1] == [STEPS] and KEPT_STEP not in records,
        **dict.fromkeys(losses_differ(run, expected), False),
    }
    outcome = "one replica goes on; what the cut-off host keeps is set aside"
    bound_s = HANG_S + SILENCE_MORE_S
    found = stopped(run, outcome, checks, strike.formed_s, bound_s)
    return replace(found, strikes=(strike,), same_bits=bits)


def _over_two(here: Ground, blow: signal.Signals, words: tuple[str, ...]) -> Run:
    """Run over two supervisors until the one that decides is struck and the other has ended."""
    folder = here.fresh([Fault("d1", KEPT_STEP, "forward", 1, "sleep", seconds=2 * HANG_S)])
    program, secret = folder / "bundle" / "launch.py", folder / "secret"
    text = program.read_text()
    program.write_text(text.replace(', "train.py"', ', "train.py", ("a", "a", "b", "b")'))
    subprocess.run(("sh", "-c", how_to_make(str(secret))), check=True, timeout=30)
    place = f"127.0.0.1:{_free_port()}"
    common = ("--secret", str(secret), "--spares", "0", "--hang", str(HANG_S))
    join = (sys.executable, "launch.py", "--join", place, "--host", "b", *common)
    with ExitStack() as stack:
        said = stack.enter_context((folder / "agent.txt").open("wb"))
        agent = subprocess.Popen(
            (*join, "--logs", "../logs-b"),
            cwd=folder / "bundle",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        stack.callback(_end, agent)

        def strike(live: Live) -> None:
            live.wait_struck(0)
            live.facts["at"] = time.time()
            live.process.send_signal(blow)
            live.facts["agent"] = agent.wait(DEADLINE_S)
            live.facts["agent_ended_s"] = time.time()
            live.process.kill()

        head = launch_words(STEPS, "--secret", str(secret), "--listen", place, *words, spares=0)
        return run_job(folder, (*head, "--hang", str(HANG_S)), DEADLINE_S, strike)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(DEADLINE_S)
