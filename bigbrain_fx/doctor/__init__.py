"""Probe this host: memory, cores, rates, loopback; the result becomes a cluster.json.

This room knows one host; it knows nothing of models. Only its child processes import torch.
"""

from bigbrain_fx.doctor.fleet import ProbeError
from bigbrain_fx.doctor.probe import Gpu, HostProbe, Rates, probe

__all__ = ["Gpu", "HostProbe", "ProbeError", "Rates", "probe"]
