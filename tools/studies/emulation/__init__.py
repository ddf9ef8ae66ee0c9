"""A cluster on one machine: every device is a process with its own speed, memory and wires.

    with emulated(cluster) as net:
        done = net.run(bundle, RunOptions(steps=5))  # a launch.Run: losses, seconds, peak memory
        found = net.survey()                         # what doctor measures of these devices

`quotas` says how fast each device may be, `groups` holds it there, `relay` carries the packets,
`nursery` starts the processes, `awake` keeps processors from sleeping between quotas, `watchdog`
tidies up after a killed owner, and `network` is all of these; `profiling` profiles a model on every
device. relay, nursery, echo, awake and watchdog are programs of their own that import nothing of
ours.
"""

from tools.studies.emulation.network import Network, emulated, missing
from tools.studies.emulation.quotas import Quota, quotas, wires

__all__ = ["Network", "Quota", "emulated", "missing", "quotas", "wires"]
