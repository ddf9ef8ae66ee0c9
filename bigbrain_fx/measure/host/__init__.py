"""Probe this host: memory, cores, rates, loopback, GPUs; the result becomes a cluster.json.

`probe` describes this host as equal devices or as its GPUs; `survey` measures devices that differ,
and the link of every pair. This room knows nothing of models. Only its child processes import
torch.
"""

from bigbrain_fx.measure.host.far import Hosts, survey_hosts
from bigbrain_fx.measure.host.figures import MatmulRate, Rates
from bigbrain_fx.measure.host.fleet import ProbeError
from bigbrain_fx.measure.host.host import Gpu, HostProbe
from bigbrain_fx.measure.host.probing import probe
from bigbrain_fx.measure.host.survey import DeviceProbe, Survey, survey

__all__ = [
    "DeviceProbe",
    "Gpu",
    "HostProbe",
    "Hosts",
    "MatmulRate",
    "ProbeError",
    "Rates",
    "Survey",
    "probe",
    "survey",
    "survey_hosts",
]
