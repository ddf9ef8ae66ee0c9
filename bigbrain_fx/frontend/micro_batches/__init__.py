"""Comparison of a training step in micro-batches with the step on the batch, by gradients.

    whole batch ──▶ loss, gradients ─────────────┐
    micro-batch 0, 1, ... ──▶ losses, gradients ─┴▶ difference ──▶ cause ──▶ remedy, tried

`comparison` runs the user's module; it knows nothing of plans, and uses a graph only to name a
line.
"""
