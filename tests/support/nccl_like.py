"""A gloo that behaves as nccl does, as text for the start of a program that runs on CPUs.

A message has no tag, and the first one of two ranks in a group makes a communicator: whoever sends
or receives then waits until the other end does.
"""

NCCL_LIKE = """
from datetime import timedelta

import torch.distributed as dist

isend, irecv, init = dist.isend, dist.irecv, dist.init_process_group
connected = set()


def as_nccl(start):
    def started(tensor, peer, group=None, tag=0):
        name, me = group.group_name if group else "all", dist.get_rank()
        if (name, peer) not in connected:
            connected.add((name, peer))
            store = dist.distributed_c10d._get_default_store()
            store.set(f"ready/{name}/{peer}/{me}", "1")
            store.wait([f"ready/{name}/{me}/{peer}"], timedelta(seconds=15))
        return start(tensor, peer, group=group)

    return started


def init_like(backend, **others):
    init("gloo", **others)
    dist.get_backend = lambda: backend
    if backend == "nccl":
        dist.isend, dist.irecv = as_nccl(isend), as_nccl(irecv)
        dist.send = lambda tensor, peer, group=None: dist.isend(tensor, peer, group).wait()
        dist.recv = lambda tensor, peer, group=None: dist.irecv(tensor, peer, group).wait()


dist.init_process_group = init_like
"""
