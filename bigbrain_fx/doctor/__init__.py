"""Probe this host: memory, cores, rates, loopback; the result becomes a cluster.json.

`probe` describes this host as equal devices; `survey` measures devices that differ, and the link of
every pair. This room knows nothing of models. Only its child processes import torch.
"""

from bigbrain_fx.doctor.fleet import ProbeError
from bigbrain_fx.doctor.probe import Gpu, HostProbe, MatmulRate, Rates, probe
from bigbrain_fx.doctor.survey import DeviceProbe, Survey, survey

__all__ = [
    "DeviceProbe",
    "Gpu",
    "HostProbe",
    "MatmulRate",
    "ProbeError",
    "Rates",
    "Survey",
    "probe",
    "survey",
]
