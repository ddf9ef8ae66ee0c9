"""Forms under drawn options: each right, refused or stopped with words, whatever is asked for.

    python -m tools.conformance forms --drawn 7 --count 100

A feature is tried with seven models elsewhere; here with hundreds of small ones, none of which was
written for it. What a seed draws is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tools.conformance.forms import Form, forms

CHOICES = (
    "--replicas 2",
    "--replicas 2 --sum-order micro",
    "--replicas 2 --sum-order tree",
    "--replicas 2 --sum-order micro --replica-shares 3:1",
    "--replicas 2 --zero 1",
    "--replicas 2 --zero 2 --sum-order micro",
    "--replicas 2 --zero 3 --sum-order micro",
    "--replicas 2 --zero 3 --sum-order tree --replica-shares 3:1",
    "--replicas 2 --sum-order backend",
    "--replicas 2 --zero 2 --sum-order backend",
    "--replicas 2 --schedule zb-h1 --zero 1 --sum-order backend",
    "--replicas 2 --schedule zb-h1 --sum-order micro",
    "--replicas 2 --schedule interleaved",
    "--replicas 2 --schedule zb-v --zero 1",
    "--replicas 2 --recompute all --zero 2 --sum-order tree",
    "--replicas 2 --recompute ops --zero 3 --sum-order micro",
    "--replicas 2 --schedule zb-v --zero 2 --sum-order micro",
    "--replicas 2 --schedule interleaved --recompute all --zero 1 --sum-order micro",
    "--replicas 2 --schedule zb-h1 --recompute all --zero 2 --sum-order tree",
    "--replicas 2 --offload activations,state --recompute all --zero 1 --sum-order micro",
    "--schedule interleaved --recompute ops --offload activations",
    "--tensor 2 --schedule zb-h1 --recompute all",
    "--tensor 2 --offload activations,state --recompute all",
    "--schedule zb-h1",
    "--schedule gpipe",
    "--schedule interleaved",
    "--schedule zb-v",
    "--schedule dualpipe-v",
    "--schedule auto",
    "--schedule gems",
    "--schedule gems --sum-order micro --recompute all",
    "--schedule gems --offload activations,state",
    "--schedule gems --replicas 2 --sum-order tree",
    "--recompute all",
    "--recompute ops",
    "--recompute 0 --schedule zb-h1",
    "--tensor 2",
    "--tensor 2 --tensor-shares 3:1",
    "--tensor 2 --recompute all",
    "--tensor 2 --replicas 2",
    "--tensor 2 --replicas 2 --sum-order tree --zero 1",
    "--tensor 2 --replicas 2 --sum-order micro --zero 3 --tensor-shares 3:1",
    "--offload state",
    "--offload state --schedule zb-h1",
    "--offload state --replicas 2 --zero 1",
    "--offload activations",
    "--offload activations,state --schedule gpipe",
    "--offload activations --replicas 2 --zero 1",
    "--offload activations --recompute ops",
    "--offload weights",
    "--offload weights --schedule gpipe",
    "--partitioner analytical --cut-at blocks",
    "--partitioner scattered",
    "--partitioner m-sct",
    "--partitioner auto",
)
_MANY = ("interleaved", "zb-v", "dualpipe-v", "gems")


def drawn(seed: int, count: int) -> Iterator[Form]:
    """Yield forms that are right by themselves, each with options that were drawn."""
    dice = random.Random(seed)
    pool = [form for form in forms() if form.expected == "right"]
    for _ in range(count):
        form, choice = dice.choice(pool), dice.choice(CHOICES)
        words = choice.split()
        options = tuple(zip((w[2:] for w in words[::2]), words[1::2], strict=True))
        stages = 1 if dice.random() < 0.3 else 2
        shared = 2 ** len({"replicas", "tensor"} & dict(options).keys())
        yield replace(
            form,
            title=f"{stages * shared} devices {choice}",
            expected="right or refused",
            options=(*options, ("devices", str(stages * shared))),
            micro_batches=_micro_batches(form, dict(options)),
        )


def _micro_batches(form: Form, options: dict[str, str]) -> int:
    """Return four where pieces or replicas ask for them, unless the form goes in one only."""
    many = "replicas" in options or options.get("schedule") in _MANY
    return max(4, form.micro_batches) if many and form.micro_batches > 1 else form.micro_batches
