# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202  # it patches what has its types elsewhere
"""Strikes at given instructions of a run, and writes down what each process did.

This file is copied into a bundle as faults.py, by `tools/conformance/faults/bundle.py`, and
imported by its train.py. A fault is taken once, by whoever comes first to its place: a file marks
it.
"""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from runtime import Device, snapshots, worker
from runtime.checkpoint_store import CheckpointStore
from runtime.checkpoints import Checkpoints
from runtime.disk import Disk
from runtime.mesh import PassedOn
from runtime.network import NetworkTransport
from runtime.state import state_of

try:
    from runtime.peer_states import PeerStates
except ImportError:  # a bundle without replicas
    PeerStates = None

FOLDER = Path(__file__).resolve().parent / "faults"
PLAN = json.loads((FOLDER / "planned.json").read_text())
FAULTS = PLAN["faults"]
INSTRUCTIONS = (
    "forward",
    "backward",
    "send",
    "recv",
    "send_tied",
    "recv_tied",
    "send_norms",
    "recv_norms",
    "sum_gradients",
    "optimizer_step",
)
KINDS = {"parameter": "parameters", "optimizer": "optimizer"}  # the rest: buffers and facts
PATIENCE_S = 120.0
POLL_S = 0.01
names = []
mine = SimpleNamespace(name="", device=None, corrupt=False)
counts = {}  # of this step and device: instruction -> how many have begun
forwards = {}  # of this process, ever: device -> how many


# --------------------------------------------------------------------------- strikes


def strike(name, step, place, nth=0, generation=0):
    """Do what is planned for this place, if it was not done before; return its name or None."""
    for number, fault in enumerate(FAULTS):
        if [fault["device"], fault["step"], fault["at"], fault["nth"]] != [name, step, place, nth]:
            continue
        after = fault["after"]
        if generation < fault["generation"] or (after is not None and not struck(after).exists()):
            continue
        if struck(number).exists():  # in a replay: what catches up gets no spares to wait for
            continue
        wait_for_spares(fault["spares"], fault["spares_s"])
        if take(number):
            return act(fault)
    return None


def struck(number):
    """Return the file that marks a fault as done."""
    return FOLDER / f"struck-{number}"


def take(number):
    """Mark a fault as done, with the time; False if it was."""
    part = FOLDER / f".{number}.{os.getpid()}"
    part.write_text(repr(time.time()))
    try:
        os.link(part, struck(number))
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True


def act(fault):
    """Strike."""
    what = fault["what"]
    if what in ("kill", "stop", "stop_others"):
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        for other in fault["others"]:
            os.kill(int((FOLDER / f"pid-{other}").read_text()), number)
        if what != "stop_others":
            os.kill(os.getpid(), number)
    elif what == "kill_parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)
    elif what == "end_run":
        os.kill(os.getppid(), signal.SIGTERM)
    elif what == "raise":
        raise ZeroDivisionError("on purpose")
    elif what == "sleep":
        time.sleep(fault["seconds"])
    elif what == "run":
        subprocess.run(fault["words"], check=True, timeout=30)
    elif what == "corrupt":
        mine.corrupt = True
    return what


def wait_for_spares(count, at_most_s):
    """Wait until so many spares are warm; meanwhile this process does not look like one that hangs.

    A bound that holds for a warm spare can be measured only if there is one. None is started while
    a device catches up: who may strike then waits `at_most_s`.
    """
    until = time.monotonic() + (at_most_s or PATIENCE_S)
    while warm_spares() < count:
        if time.monotonic() > until:
            if at_most_s:
                return
            raise TimeoutError(f"{count} spares were not warm within {PATIENCE_S:g} s")
        control = getattr(getattr(mine.device, "transport", None), "control", None)
        if control is not None:
            control.tick()
        time.sleep(POLL_S)


def warm_spares():
    """Count them in the event log."""
    path = Path(PLAN["events"])
    warm = set()
    for line in path.read_text().splitlines() if path.exists() else []:
        if not line.endswith("}"):
            continue
        event = json.loads(line)
        if event["event"] == "spare_ready":
            warm.add(event["pid"])
        elif event["event"] in ("assigned", "died"):
            warm.discard(event["pid"])
    return len(warm)


# --------------------------------------------------------------------------- places


def is_real(device):
    """Whether messages leave this process: not in a spare's warm-up, not in the reference."""
    return isinstance(device.transport, NetworkTransport) or hasattr(device.transport, "control")


def generation_of(device):
    """Return the generation that a device is in; 0 without a supervisor."""
    return max(0, getattr(device.transport, "generation", 0))


def place(device, name):
    """Count an instruction and strike before it."""
    seen = counts.setdefault(device.name, {})
    nth, total = seen.get(name, 0), seen.get("any", 0)
    seen[name], seen["any"] = nth + 1, total + 1
    if not is_real(device):
        return None
    where = generation_of(device)
    return strike(device.name, device.step, "any", total, where) or strike(
        device.name, device.step, name, nth, where
    )


def place_of_kind(device, kind):
    """Count what is sent of one kind, and strike before it: "send_gradient"."""
    name, seen = f"send_{kind}", counts.setdefault(device.name, {})
    seen[name] = seen.get(name, 0) + 1
    if not is_real(device):
        return None
    return strike(device.name, device.step, name, seen[name] - 1, generation_of(device))


def counted(method, name):
    """Return a method of Device that strikes first."""

    def run(self, *args, **kwargs):
        struck = place(self, name)
        if name == "send":
            struck = struck or place_of_kind(self, args[0].kind)
        if struck == "nan":
            for value in kwargs.values():
                value.detach().fill_(float("nan"))
        if struck == "wrong":  # finite; what is sent only
            args = (*args[:-1], args[-1] * 1.5)
        if name == "forward":
            forwards[self.name] = forwards.get(self.name, 0) + 1
        if name == "optimizer_step" and is_real(self):
            self.optimizer and halved(self)
        result = method(self, *args, **kwargs)
        if name == "optimizer_step" and is_real(self):
            strike(self.name, self.step, "updated", 0, generation_of(self))
        return result

    return run


def halved(device):
    """Let the optimizer's step stop for a strike when half of the parameters are updated."""
    optimizer = device.optimizer
    whole = optimizer.step
    if not any(f["at"] == "in_update" and f["device"] == device.name for f in FAULTS):
        return

    def step(*args, **kwargs):
        del optimizer.step
        due = [
            number
            for number, f in enumerate(FAULTS)
            if [f["device"], f["step"], f["at"]] == [device.name, device.step, "in_update"]
            and not struck(number).exists()
        ]
        if due:
            kept = [(p, p.grad) for p in device.parameters.values()]
            for parameter, _ in kept[len(kept) // 2 :]:
                parameter.grad = None
            whole(*args, **kwargs)
            strike(device.name, device.step, "in_update", 0, generation_of(device))
            raise RuntimeError("a strike in an update must not come back")
        return whole(*args, **kwargs)

    optimizer.step = step


def at_begin(device, step):
    """A step begins."""
    counts[device.name] = {}
    mine.name, mine.device = device.name, device
    if is_real(device):
        (FOLDER / f"pid-{device.name}").write_text(str(os.getpid()))
        wait_at_gate(device, step)
        strike(device.name, step, "begin", 0, generation_of(device))


def at_end(device, step):
    """A step ends: write down what this process has done so far."""
    if is_real(device):
        strike(device.name, step, "end", 0, generation_of(device))
    seen = {"step": step, "forwards": forwards.get(device.name, 0), "pid": os.getpid()}
    seen["instructions"] = counts[device.name].get("any", 0)
    if step + 1 == PLAN["steps"]:
        seen["hashes"] = hashes(device)
    with (FOLDER / f"{device.name}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")


def hashes(device):
    """Return the SHA-256 of parameters, of optimizer state, and of all else that a state has."""
    state = state_of(device)
    found = {kind: hashlib.sha256() for kind in ("parameters", "optimizer", "rest")}
    for name, tensor in sorted(state.tensors.items()):
        into = found[KINDS.get(name.partition(":")[0], "rest")]
        into.update(name.encode())
        into.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    found["rest"].update(json.dumps(state.facts, sort_keys=True).encode())
    return {kind: value.hexdigest() for kind, value in found.items()}


def wait_at_gate(device, step):
    """Stop before every block of steps until the tool lets this run go on: for timing in turn."""
    block = PLAN["block"]
    if not block or step % block:
        return
    with (FOLDER / f"gate-{device.name}").open("a") as file:
        file.write(f"{time.monotonic()} ")
    until = time.monotonic() + PATIENCE_S
    while not (FOLDER / f"go-{step // block}").exists():
        if time.monotonic() > until:
            raise TimeoutError("nobody opened the gate")
        control = getattr(device.transport, "control", None)
        if control is not None:
            control.tick()
        time.sleep(POLL_S)
    with (FOLDER / f"gate-{device.name}").open("a") as file:
        file.write(f"{time.monotonic()}\n")


# --------------------------------------------------------------------------- snapshots, commits


def copied(self, device, number):
    """A copy to a slot of the supervisor's memory: a strike leaves half of it."""
    if any(fault["at"] == "snapshot" for fault in FAULTS):
        state = state_of(device, {"channels": self.transport.known_layouts()})
        room = bytearray(state.nbytes)
        state.copy_into(room)
        memoryview(self._map(number, len(room)))[: len(room) // 2] = room[: len(room) // 2]
        strike(device.name, device.step, "snapshot", 0, generation_of(device))
    return copy_whole(self, device, number)


def write(self, path, pieces):
    """A file of a commit: a strike leaves half of it; a full disk, a part."""
    pieces = list(pieces)
    if (FOLDER / "full").exists():
        path.write_bytes(b"".join(bytes(piece) for piece in pieces)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    step = int(path.parent.name.split("-")[1]) if path.parent.name.startswith("commit-") else -1
    if any([f["at"], f["step"], f["device"]] == ["commit", step, mine.name] for f in FAULTS):
        data = b"".join(bytes(piece) for piece in pieces)
        path.write_bytes(data[: len(data) // 2])
        strike(mine.name, step, "commit")
        path.unlink()
    return write_whole(self, path, pieces)


def commit(self, parts, *args, **kwargs):
    """All files of a checkpoint are in place; what names them is not."""
    strike(mine.name, next(iter(parts.values())).step, "before_record")
    return commit_whole(self, parts, *args, **kwargs)


def begin(self, *args, **kwargs):
    """A device starts or goes on from a commit: how long that takes."""
    start = time.monotonic()
    try:
        return join_commits(self, *args, **kwargs)
    finally:
        (FOLDER / f"joined-{self.name}").write_text(repr(time.monotonic() - start))


copy_whole, snapshots.OwnSnapshots._copy = snapshots.OwnSnapshots._copy, copied
write_whole, Disk.write = Disk.write, write
commit_whole, CheckpointStore.commit = CheckpointStore.commit, commit
join_commits, Checkpoints.begin = Checkpoints.begin, begin


# --------------------------------------------------------------------------- messages, connections


def start_send(self, line, payload, tag):
    """A message leaves; a strike flips a bit of it on its way."""
    if mine.corrupt and tag % 2:  # not the header
        mine.corrupt = False
        payload = payload.clone()
        payload[1] ^= 64
    return send_whole(self, line, payload, tag)


def strike_from(name, newest, at):
    """Strike in a generation: a fault's step is the first that will do.

    On a busy machine connections are lost before a death is heard: then there is one more.
    """
    for generation in range(newest + 1):
        strike(name, generation, at, 0, newest)


def mesh(store, rank, world):
    """A generation's connections are about to be made."""
    store.name = names[rank]
    mine.name = names[rank]
    strike_from(store.name, store.generation, "ready")
    return form_mesh(store, rank, world)


def put(store, key, value):
    """A device has told the others where to connect to."""
    tell(store, key, value)
    strike_from(store.name, store.generation, "addressed")


def give(self, *args):
    """A device gives its state to another."""
    strike_from(self.device.name, self.device.transport.generation, "giving")
    return give_whole(self, *args)


def run_step(self, step):
    """A step, before which this is no hook: those might write into a device."""
    at_begin(self, step)
    return run_whole(self, step)


if PeerStates is not None:
    give_whole, PeerStates._give = PeerStates._give, give
run_whole, Device.run_step = Device.run_step, run_step
send_whole, NetworkTransport._start_send = NetworkTransport._start_send, start_send
form_mesh, worker.form_mesh = worker.form_mesh, mesh
tell, PassedOn.set = PassedOn.set, put

for _name in (each for each in INSTRUCTIONS if hasattr(Device, each)):  # a pipeline has fewer
    setattr(Device, _name, counted(getattr(Device, _name), _name))


def install(bundle):
    """Strike in the runs of a bundle; train.py calls this."""
    names.extend(cls.name for cls in bundle.devices)
    bundle.hooks.on_step_end.append(at_end)
    print(f"faults installed: {len(FAULTS)}", file=sys.stderr)
