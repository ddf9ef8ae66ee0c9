"""A training step that no trace can hold, as one op: the user's own Python on one device.

    refusal of a split ─▶ one plain step in a fork ─▶ Graph of one op, `user.step`

Nothing inside is known: no op, no cut. Model, loss, optimizer and hooks run as the user has them.
"""
