"""Algebraic rewrites: graph -> places that can be computed otherwise -> the graph that does so.

A rewrite is a file here with one verb, `find(graph)`, which yields `core.RewritePlace`s.
`rewritten_graph` puts their ops into the graph, `rewrite_trial` cuts one out to be run both ways.

This room knows ops. It knows nothing of devices, costs or torch: what a place gains, the planner
finds; whether it computes the same, and how its tensors lie, `frontend` finds by running it.
"""

from __future__ import annotations

from bigbrain_fx.plan.rewriting.apply import (
    places_again as places_again,
    rewrite_places as rewrite_places,
    rewrite_trial as rewrite_trial,
    rewritten_graph as rewritten_graph,
)
