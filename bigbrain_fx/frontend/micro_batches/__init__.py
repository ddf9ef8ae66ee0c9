"""Whether a training step in micro-batches is the step on the whole batch: compared by gradients.

    whole batch ──▶ loss, gradients ─────────────┐
    micro-batch 0, 1, ... ──▶ losses, gradients ─┴▶ difference ──▶ cause ──▶ remedy, tried

`comparison` runs the user's module; it knows nothing of plans, and a graph only to name a line.
"""
