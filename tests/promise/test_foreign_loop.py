"""Stages in anyone's own training loop: plain modules with the model's own parameter names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.promise.conftest import Outside

# It runs where bigbrain-fx cannot be imported; letters.py is the user's own file.
LOOP = """
import importlib, sys
import torch
from safetensors.torch import load_file

home, prefix, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path[:0] = [home] if prefix else [home, home + "/bundle"]
import letters

torch.set_num_threads(1)
torch.manual_seed(11)
model = letters.model()
assert model.head.weight is model.embed.weight
batch = letters.example_batch()

def stages():
    found = []
    for i in range(count):
        module = importlib.import_module(f"{prefix}device_d{i}")
        found.append(getattr(module, f"Stage{i}")())
    return found

def run(chain, batch):
    value = chain[0](batch["letters"])
    for stage in chain[1:-1]:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    value = value if isinstance(value, tuple) else (value,)
    return chain[-1](*value, batch["targets"])

# The weights of the bundle.
split = stages()
names = set()
for i, stage in enumerate(split):
    tensors = load_file(f"{home}/bundle/weights/d{i}.safetensors")
    stage.load_state_dict({name: tensors[name] for name in stage.state_dict()})
    names |= set(stage.state_dict())
assert names == set(model.state_dict()), names ^ set(model.state_dict())

# The user's own checkpoint: it has more than one stage needs, and nothing is missing.
chain = stages()
for stage in chain:
    assert not stage.load_state_dict(model.state_dict(), strict=False).missing_keys

# Dropout on, the same global seed: the same numbers, for no key is active.
model.train()
torch.manual_seed(3)
expected = letters.loss(model(batch["letters"]), batch)
torch.manual_seed(3)
found = run(chain, batch)
assert torch.equal(found, expected), (found, expected)

# Dropout off.
torch.nn.functional.dropout = lambda x, *rest, **more: x
model.eval()
expected = letters.loss(model(batch["letters"]), batch)
found = run(chain, batch)
assert torch.equal(found, expected), (found, expected)

# Gradients, a tied weight's as the sum of its two uses.
expected.backward()
found.backward()
for stage in chain:
    for name, parameter in stage.named_parameters():
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(parameter.grad, model.get_parameter(name).grad), name
total = chain[-1].head.weight.grad + chain[0].embed.weight.grad
want = model.embed.weight.grad
assert (total - want).abs().max() <= 1e-6 * want.abs().max()

# And it trains.
chain[-1].head.weight = chain[0].embed.weight
parameters = {id(p): p for stage in chain for p in stage.parameters()}
optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = run(chain, batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
print("ok", len(names))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("prefix", ["", "bundle."], ids=["device_d0", "bundle.device_d0"])
@pytest.mark.parametrize("count", [2, 3])
def test_stages_in_a_foreign_loop(
    count: int,
    prefix: str,
    letters: Path,
    three: Path,
    outside: Outside,
    tmp_path: Path,
    script: Callable[[str], str],
) -> None:
    home = letters if count == 2 else three
    assert outside.python(tmp_path, script(LOOP), str(home), prefix, str(count)) == "ok 28\n"
