"""Probe this host: memory, cores, rates, loopback, GPUs; the result becomes a cluster.json.

`probe` describes this host as equal devices or as its GPUs; `survey` measures devices that differ,
and the link of every pair. This package knows nothing of models. Only its child processes import
torch.
"""

from bigbrain_fx.measure.host.clusters import DeviceProbe as DeviceProbe
from bigbrain_fx.measure.host.far import Hosts as Hosts, survey_hosts as survey_hosts
from bigbrain_fx.measure.host.figures import MatmulRate as MatmulRate, Rates as Rates
from bigbrain_fx.measure.host.fleet import ProbeError as ProbeError
from bigbrain_fx.measure.host.host import HostProbe as HostProbe
from bigbrain_fx.measure.host.probing import probe as probe
from bigbrain_fx.measure.host.survey import (
    Survey as Survey,
    survey as survey,
)
