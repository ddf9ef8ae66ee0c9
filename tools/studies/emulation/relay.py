"""The wires: one process that carries packets between network namespaces, late and at a rate.

    python relay.py < CONFIG        (a program of its own: it imports nothing of ours)

Each device has a namespace with one TUN interface, `wire`. This process made them and holds them:
it reads what a device sends, and writes it to the receiver when it would have come over the wire.
Each direction of each pair is a wire of its own and carries one packet at a time:

    start = max(read, free);  free = start + bytes / rate;  delivered = free + latency

A host's NIC, where it is scarce, is one more such clock for all packets out of the host, and one
for all into it; a packet is delivered when all its clocks are through with it.

Namespaces and interfaces have no names on the host and last as long as a process uses them, so
nothing of them can be left behind. The first line on stdin is the configuration; a later one gives
`lead_s`, how much sooner to deliver for what the way through the kernel and here takes; the end of
stdin is the end. Frames of 65,000 bytes make 1 Gbit/s some 2,000 packets a second, which plain
Python can carry.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

INTERFACE = "wire"
MTU = 65_000
NETWORK = "10.213.0."  # device i has the address i + 1; no host route: it is seen in the namespaces
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCGIFFLAGS, SIOCSIFFLAGS = (
    0x8916, 0x891C, 0x8922, 0x8913, 0x8914,
)  # fmt: skip
IFF_UP = 0x1
PR_SET_TIMERSLACK = 29
AT_ONCE = 16  # packets read from one device before others get their turn
# Windows must hold the wire's round trip and what waits in both directions.
WINDOWS = {"tcp_rmem": "4096 4194304 16777216", "tcp_wmem": "4096 4194304 16777216"}

libc = ctypes.CDLL(None, use_errno=True)


class Clock:
    """What carries one packet at a time: seconds a byte, and when it is free."""

    __slots__ = ("free_s", "s_per_byte")

    def __init__(self, bytes_per_s: float) -> None:
        self.s_per_byte, self.free_s = 1.0 / bytes_per_s, 0.0

    def through_s(self, now_s: float, nbytes: int) -> float:
        """Take a packet that was sent now; return when it is through."""
        self.free_s = max(now_s, self.free_s) + nbytes * self.s_per_byte
        return self.free_s


class Wire:
    """One direction between two devices: seconds late, and what all its packets pass."""

    __slots__ = ("clocks", "described_s", "latency_s")

    def __init__(self, latency_s: float, bytes_per_s: float, nics: Sequence[Clock] = ()) -> None:
        self.described_s = self.latency_s = latency_s
        self.clocks = (Clock(bytes_per_s), *nics)

    def lead(self, lead_s: float) -> None:
        """Deliver so much sooner than described."""
        self.latency_s = max(0.0, self.described_s - lead_s)

    def arrival_s(self, now_s: float, nbytes: int) -> float:
        """Take a packet that was sent now; return when it arrives."""
        return max(clock.through_s(now_s, nbytes) for clock in self.clocks) + self.latency_s


def address(index: int) -> str:
    """Return the address of a device in the namespaces' network."""
    return f"{NETWORK}{index + 1}"


def main() -> None:
    """Make the namespaces, say where they are, carry packets until stdin ends."""
    control = sys.stdin.fileno()
    config = json.loads(_line(control))
    _hurry()
    count, spaces, tuns = config["devices"], [], []
    for index in range(count):
        spaces.append(_namespace())
        tuns.append(_interface(index))
    wires: list[list[Wire | None]] = [[None] * count for _ in range(count)]
    nics = {name: Clock(bytes_per_s) for name, bytes_per_s in config["nics"].items()}
    for a, b, latency_s, bytes_per_s, passed in config["wires"]:
        wires[a][b] = Wire(latency_s, bytes_per_s, [nics[name] for name in passed])
    print(json.dumps({"pid": os.getpid(), "namespaces": spaces}), flush=True)
    carry(tuns, wires, control)


def carry(tuns: Sequence[int], wires: Sequence[Sequence[Wire | None]], control: int) -> None:
    """Carry packets until the writer of `control` is gone."""
    index_of = {tun: index for index, tun in enumerate(tuns)}
    watched = [*tuns, control]
    under_way: list[tuple[float, int, int, bytes]] = []  # arrival, order, receiver's tun, packet
    order = 0
    while True:
        now_s = time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            _, _, tun, packet = heapq.heappop(under_way)
            _deliver(tun, packet)
            now_s = time.monotonic()
        wait_s = max(0.0, under_way[0][0] - now_s) if under_way else None
        ready, _, _ = select.select(watched, (), (), wait_s)
        if control in ready:
            line = _line(control)
            if not line:
                return
            ready.remove(control)
            for each in filter(None, itertools.chain(*wires)):
                each.lead(json.loads(line)["lead_s"])
        now_s = time.monotonic()
        for tun in ready:
            sender = index_of[tun]
            for packet in _packets(tun):
                receiver = _receiver(packet, len(tuns))
                wire = None if receiver is None else wires[sender][receiver]
                if receiver is None or wire is None:
                    continue  # for nobody: a broadcast, another protocol
                order += 1
                due_s = wire.arrival_s(now_s, len(packet))
                heapq.heappush(under_way, (due_s, order, tuns[receiver], packet))


def _line(control: int) -> bytes:
    """Read one line, past no buffer that `select` does not see; nothing at the end."""
    line = b""
    while not line.endswith(b"\n") and (more := os.read(control, 65536)):
        line += more
    return line


def _packets(tun: int) -> list[bytes]:
    packets: list[bytes] = []
    try:
        while len(packets) < AT_ONCE:
            packets.append(os.read(tun, MTU + 100))
    except BlockingIOError:
        pass
    return packets


def _receiver(packet: bytes, count: int) -> int | None:
    """Return the index of the device that an IPv4 packet is for."""
    if packet[0] >> 4 != 4:
        return None
    index = packet[19] - 1
    return index if 0 <= index < count else None


def _deliver(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:  # the receiver's queue is full: as on a wire, the packet is lost
        return


# --------------------------------------------------------------------------- the kernel


def _hurry() -> None:
    """Ask to be woken on time and before others; do without where that is not granted."""
    libc.prctl(PR_SET_TIMERSLACK, 1)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        os.nice(-20)


def _namespace() -> int:
    """Move into a new network namespace; return a file descriptor that holds it."""
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    for name, value in {**WINDOWS, "tcp_slow_start_after_idle": "0"}.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _interface(index: int) -> int:
    """Make this namespace's interface and bring it up; return the wire's end of it."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, _request(INTERFACE, struct.pack("H", IFF_TUN | IFF_NO_PI)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        fcntl.ioctl(door, SIOCSIFADDR, _request(INTERFACE, _inet(address(index))))
        fcntl.ioctl(door, SIOCSIFNETMASK, _request(INTERFACE, _inet("255.255.255.0")))
        fcntl.ioctl(door, SIOCSIFMTU, _request(INTERFACE, struct.pack("i", MTU)))
        for name in (INTERFACE, "lo"):
            flags = fcntl.ioctl(door, SIOCGIFFLAGS, _request(name, b""))
            (now,) = struct.unpack_from("H", flags, 16)
            fcntl.ioctl(door, SIOCSIFFLAGS, _request(name, struct.pack("H", now | IFF_UP)))
    return tun


def _request(name: str, value: bytes) -> bytes:
    """Lay out a struct ifreq: the interface's name, then a union."""
    return struct.pack("16s24s", name.encode(), value)


def _inet(text: str) -> bytes:
    """Lay out a struct sockaddr_in."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))


if __name__ == "__main__":
    main()
