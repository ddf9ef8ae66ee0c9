"""Runs of a bundle in which processes die at given instructions; for tests and for
tools/conformance/faults.

The faults are installed in a copy of the bundle, by a line in its train.py; neither the runtime nor
the supervisor knows of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigbrain_fx.bundles.launch import start_supervised
from bigbrain_fx.supervisor import (
    Event,
    EventLog,
    FailedError,
    Job,
    Outcome,
    Rescue,
    Start,
    Supervisor,
)
from tests.support.bundles import copied, edit

FAULTS = '''"""Ends this process at given instructions, and writes down what it did."""
import hashlib, json, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

from runtime import worker
from runtime import Device
from runtime.mesh import PassedOn
from runtime.state import state_of

try:
    from runtime.peer_states import PeerStates
except ImportError:  # a bundle without replicas
    PeerStates = None

FOLDER = Path(__file__).resolve().parent / "faults"
PLANNED = json.loads((FOLDER / "planned.json").read_text())
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
INSTRUCTIONS = ("forward", "backward", "send", "recv", "send_tied", "recv_tied", "send_norms",
                "recv_norms", "reduce_gradients", "sum_gradients", "optimizer_step")
count, forwards, steps, logged = 0, 0, [], []


def strike(device, place):
    for number, fault in enumerate(PLANNED):
        if [fault["device"], fault["step"], fault["at"]] != [device.name, device.step, place]:
            continue
        wait_for(fault["awaits"])
        try:
            taken = os.open(FOLDER / f"struck-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            continue
        os.write(taken, repr(time.time()).encode())
        os.close(taken)
        what = fault.get("what", "kill")
        if what == "wrong":
            return what
        if what == "raise":
            raise ZeroDivisionError("on purpose")
        if what == "sleep":
            time.sleep(fault["seconds"])
        elif what == "links":
            device.transport.inner.abandon()
        else:
            os.kill(os.getpid(), SIGNALS[what])
        return


def wait_for(path):
    """Wait until a file is there that is written beside the steps."""
    until = time.monotonic() + 50.0
    while path and not os.path.exists(path):
        assert time.monotonic() < until, f"{path} was never there"
        time.sleep(0.01)


def counted(method, name):
    def run(self, *args, **kwargs):
        global count, forwards
        if type(self.transport).__name__ != "ReplayTransport":
            return method(self, *args, **kwargs)
        if strike(self, count) == "wrong":  # finite, and in what is sent only
            channel, micro, tensor = args
            args = channel, micro, tensor * 1.5
        count += 1
        forwards += name == "forward"
        result = method(self, *args, **kwargs)
        if name == "optimizer_step":
            strike(self, "updated")
        return result

    return run


for name in (each for each in INSTRUCTIONS if hasattr(Device, each)):  # a pipeline has fewer
    setattr(Device, name, counted(getattr(Device, name), name))
if (FOLDER.parent / "runtime" / "deferred.py").exists():
    from runtime.deferred import DeferringDevice

    DeferringDevice.backward_weight = counted(DeferringDevice.backward_weight, "backward_weight")


def run_step(device, step):
    global count
    count = 0
    if getattr(device, "replicas", None) is not None and not hasattr(device.replicas, "struck"):
        strike_in_second_phase(device, device.replicas)
    return run(device, step)


def strike_in_second_phase(device, replicas):
    """A bucket's parts are added: before the sums leave, after one has, before others' come."""
    replicas.struck, send, recv = True, replicas.send_sums, replicas.recv_sums

    def at(place):
        if type(device.transport).__name__ == "ReplayTransport":
            strike(device, place)

    def send_sums():
        whole = replicas.buckets
        for place, some in (("summed", whole[:1]), ("half summed", whole[1:])):
            at(place)
            replicas.buckets = some
            send()
        replicas.buckets = whole

    def recv_sums():
        at("gathering")
        recv()

    replicas.send_sums, replicas.recv_sums = send_sums, recv_sums


run, Device.run_step = Device.run_step, run_step


def at_end(device, step):
    if type(device.transport).__name__ != "ReplayTransport":
        return
    strike_at_end(device)
    steps.append(step)
    if getattr(device, "goes_on", False):
        return  # the next has begun: there is no state of this one's end
    logged.append(sum(len(sent.log) for sent in device.transport.sent.values()))
    state = state_of(device)
    room = bytearray(state.nbytes)
    state.copy_into(room)
    seen = {"pid": os.getpid(), "forwards": forwards, "steps": steps, "instructions": count,
            "logged": logged, "hash": hashlib.sha256(room).hexdigest()}
    whole = FOLDER / f"{device.name}-{os.getpid()}.json"
    whole.with_suffix(".tmp").write_text(json.dumps(seen))
    whole.with_suffix(".tmp").replace(whole)  # it may be ended at any time


def strike_at_end(device):
    strike(device, "end")


def forming(at, name, newest):
    """A generation's connections are made: a fault's `step` is the first that it may strike in.

    On a busy machine connections are lost before a death is heard: then there is one more.
    """
    for generation in range(newest + 1):
        strike(SimpleNamespace(name=name, step=generation), at)


def mesh(store, rank, world):
    forming("ready", names[rank], store.generation)
    store.rank = rank
    return form_mesh(store, rank, world)


def put(store, key, value):
    tell(store, key, value)
    forming("addressed", names[store.rank], store.generation)


def give(self, inner, taker, names, step):
    forming("giving", self.device.name, self.device.transport.generation)
    return given(self, inner, taker, names, step)


if PeerStates is not None:
    given, PeerStates._give = PeerStates._give, give
form_mesh, worker.form_mesh = worker.form_mesh, mesh
tell, PassedOn.set = PassedOn.set, put
names = []


def install(bundle):
    names.extend(cls.name for cls in bundle.devices)
    bundle.hooks.on_step_end.append(at_end)
'''


@dataclass(frozen=True)
class Fault:
    """What happens to a device's process: `at` an instruction of a step, counted from 0.

    `at` may also be "updated" (after the optimizer's step) or "end" (of the step), or, of buckets'
    sums, "summed" (before any leaves), "half summed" (one has), "gathering"; or, with the
    first generation that will do for the step, "ready" or "addressed" (before and after a device
    tells the others where to connect to) or "giving" (its state to another device).
    `what` is kill, stop, raise, links, sleep, or wrong: a `send` sends 1.5 times what it has.
    `awaits`: a file that it waits for.
    """

    device: str
    step: int
    at: int | str
    what: str = "kill"
    seconds: float = 0.0
    awaits: str = ""


@dataclass(frozen=True)
class Seen:
    """A finished run: the hash of every device's state, what its processes did, and the events."""

    hashes: Mapping[str, str]
    processes: Mapping[str, Sequence[dict[str, Any]]]
    losses: Sequence[float]
    events: Sequence[Event]
    outcome: Outcome
    struck: Sequence[float] = field(default_factory=tuple)

    def of(self, event: str) -> list[Event]:
        """Return all events of a name."""
        return [entry for entry in self.events if entry["event"] == event]


def with_faults(bundle: Path, folder: Path, faults: Sequence[Fault]) -> Path:
    """Return a copy of a bundle whose processes do what `faults` say."""
    copy = copied(bundle, folder)
    (copy / "faults").mkdir()
    (copy / "faults" / "planned.json").write_text(json.dumps([vars(fault) for fault in faults]))
    (copy / "faults.py").write_text(FAULTS)
    edit(
        copy / "train.py",
        "    main(BUNDLE)",
        "    import faults\n\n    faults.install(BUNDLE)\n    main(BUNDLE)",
    )
    return copy


def job(bundle: Path, names: Sequence[str], steps: int, **options: Any) -> Job:
    """Return a job for a bundle, patient enough for a loaded machine."""
    logs = bundle / "logs"
    logs.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    made = Job(
        devices=tuple(names),
        words=(sys.executable, "train.py", "--steps", str(steps), "--save", str(bundle / "out")),
        folder=bundle,
        environment={**environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        logs=logs,
        spares=0,
        every=2,
    )
    return replace(made, **options)


def supervised(
    bundle: Path,
    folder: Path,
    names: Sequence[str],
    steps: int,
    faults: Sequence[Fault] = (),
    start: Start = start_supervised,
    more_words: Sequence[str] = (),
    on_supervisor: Callable[[Supervisor], None] | None = None,
    rescue: Rescue | None = None,
    **options: Any,
) -> Seen:
    """Run a bundle under a supervisor, with faults; return what was seen."""
    folder.mkdir(exist_ok=True)
    copy = with_faults(bundle, folder, faults)
    events: list[Event] = []
    losses: list[float] = []
    log = EventLog(copy / "events.jsonl", events.append)
    made = job(copy, names, steps, **options)
    supervisor = Supervisor(
        replace(made, words=(*made.words, *more_words)),
        start,
        lambda step, loss, _: losses.append(loss),
        log,
        rescue,
    )
    if on_supervisor is not None:
        on_supervisor(supervisor)
    try:
        outcome = supervisor.run()
    except FailedError:
        raise
    except BaseException:
        for file in sorted((copy / "logs").iterdir()):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")
        print("\n".join(map(json.dumps, events)))
        raise
    finally:
        log.close()
    processes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for file in (copy / "faults").glob("*-*.json"):
        processes[file.name.rpartition("-")[0]].append(json.loads(file.read_text()))
    hashes = {
        name: max(found, key=lambda p: p["steps"][-1])["hash"]
        for name, found in processes.items()
        if found
    }
    struck = [float(f.read_text()) for f in sorted((copy / "faults").glob("struck-*"))]
    return Seen(hashes, processes, losses, events, outcome, struck)
