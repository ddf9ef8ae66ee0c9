"""Buckets summed by torch's own collectives, over gloo: in their order, pieces filled up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import free_port
from bigbrain_fx.runtime.coded import InputError
from bigbrain_fx.runtime.mpi import require_messages

LIMIT_S = 300
ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from bigbrain_fx.runtime.collectives import CollectiveReplicas, process_groups
from bigbrain_fx.runtime.peers import PeerLostError
from bigbrain_fx.runtime.buckets import buckets_of

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
about = {"stages": [0, 1], "devices": ["d0", "d1"], "dtype": "float32", "channels": []}
listed = {
    "bucket0": {**about, "params": ["a", "b"], "pieces": [3, 2], "marks": 2, "waits": []},
    "bucket1": {**about, "params": ["c"], "pieces": [0, 1], "marks": 0, "waits": []},
}
made = []

def make(devices):
    made.extend(devices)
    return [dist.new_group([0, 1]) for _ in devices]

groups = process_groups(listed, make, f"d{rank}")

def trained(zero, early):
    parameters = {n: nn.Parameter(torch.zeros(k)) for n, k in (("a", 3), ("b", 2), ("c", 1))}
    buckets = [*buckets_of(listed, f"d{rank}", (rank,), ())]
    micros = ((0, 2), (1, 3)) if zero == 2 else ((0,), (1, 2, 3))  # the others may be unequal
    found = CollectiveReplicas(buckets, micros, parameters, None, groups, zero)
    for _ in range(2):  # of two steps the second forgets the first
        found.begin()
        for micro in micros[rank]:
            found.add("c", rank, micro, torch.tensor([100.0 + micro]))  # waits for bucket0
            found.add("a", rank, micro, torch.tensor([1.0, 2.0, 3.0]) * (micro + 1))
            if rank or early:
                found.add("b", rank, micro, torch.tensor([10.0, 20.0]))
            found.after(rank, micro)
        found.sum()
        found.send_sums()
        found.recv_sums()
        made = {name: g.tolist() for (name, _), g in found.gradients(bool(zero))}
    if zero:
        with torch.no_grad():
            for name in made:
                parameters[name] += 1 + rank
        found.send_weights()
        found.recv_weights()
    return [made, {name: p.tolist() for name, p in parameters.items()}]

result = [trained(0, True), trained(1, True), trained(2, False)]
parameters = {n: nn.Parameter(torch.zeros(k)) for n, k in (("a", 3), ("b", 2), ("c", 1))}
buckets = [*buckets_of(listed, f"d{rank}", (rank,), ())]
found = CollectiveReplicas(buckets, ((0,), (1,)), parameters, None, groups, 0)
found.begin()
if rank:
    sys.exit("this process dies")
found.after(0, 0)
try:
    found.sum()
except PeerLostError as error:
    result.append(str(error))
print(json.dumps([made, result]))
"""


@pytest.mark.nightly
def test_two_processes_sum_by_torchs_collectives() -> None:
    words = [sys.executable, "-c", RANK]
    port = str(free_port())
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*words, str(rank), port], **how) for rank in (0, 1)]  # type: ignore[call-overload]
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "this process dies\n" in said[1][1], said[1][1]  # gloo's threads may add a line
    groups, (whole, one, two, lost) = json.loads(said[0][0] or repr(said[0][1]))
    assert groups == [["d0", "d1"]]
    sums = {"a": [10.0, 20.0, 30.0], "b": [40.0, 80.0], "c": [406.0]}
    assert whole[0] == sums
    assert one[0] == {"a": sums["a"]}  # rank 0 updates it, and takes the rest
    assert one[1] == {"a": [1.0] * 3, "b": [2.0] * 2, "c": [2.0]}
    assert two[0] == {"a": sums["a"]}
    assert two[1] == one[1]
    assert "Warning" not in said[0][1]
    assert lost == "a peer is gone, or too slow: the sum of bucket0 over replicas"


def test_mpi_carries_no_collectives() -> None:
    require_messages(["replica", "tree"])
    with pytest.raises(InputError, match="split with another --all-reduce-order"):
        require_messages(["backend", "backend"])
