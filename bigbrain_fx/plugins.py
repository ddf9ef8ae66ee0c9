"""Interim."""
from bigbrain_fx.core import *
from bigbrain_fx.units import units
class N:
    def partition(self, graph, cluster, costs):
        u=units(graph); n=len(cluster.devices); d={}
        for i,g in enumerate(u.groups):
            for o in g: d[o]=cluster.devices[i*n//len(u.groups)].name
        for op in graph.ops: d.setdefault(op.name, cluster.devices[0].name)
        return Placement(d)
class R:
    def partition(self, graph, cluster, costs):
        import random
        r=random.Random(0)
        u=units(graph); n=len(cluster.devices); d={}
        for i,g in enumerate(u.groups):
            k=r.randrange(n)
            for o in g: d[o]=cluster.devices[k].name
        for op in graph.ops: d.setdefault(op.name, cluster.devices[0].name)
        return Placement(d)
class E:
    def estimate(self, graph, cluster):
        return Costs({d.name:{o.name:OpCost(max(o.flops/d.flops_per_s,(o.reads_bytes+o.writes_bytes)/d.memory_bytes_per_s),2*o.flops/d.flops_per_s,0,o.writes_bytes,0) for o in graph.ops} for d in cluster.devices},cluster,{d.name:1e-10 for d in cluster.devices})
def partitioner(name, **k): return R() if name=="scattered" else N()
def estimator(name, **k): return E()
def names(): return ["naive","scattered"]
def preset(n): return (n,"analytical")
