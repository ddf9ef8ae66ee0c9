"""Switch parts of `auto`'s search off, one at a time, and compare forecast steps: see README.md."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from unittest.mock import patch

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.search import candidates, pipeline_search
from bigbrain_fx.plan.search.pipeline_search import PipelineSearch
from tools.plan_digest.case_list import MICRO_BATCHES, places

CLUSTERS = "2:1", "4:2:1:1", "4:2:1:1, 100 Mbit/s", "8 alike, a fast path"
_SETTINGS, _ORDERS = candidates.settings, pipeline_search.unit_orders
PARTS = {
    "all": (),
    "naive and chain-dp": (PipelineSearch, "planners", lambda _search: None),
    "split backwards": (PipelineSearch, "split_backwards", lambda _search: None),
    "polish": (PipelineSearch, "_polished", lambda _search, entry: entry),
    "slower links, less memory": (pipeline_search, "settings", lambda *a: _SETTINGS(*a)[:1]),
    "tapered and even splits": (candidates, "_tapered", lambda _cutter, _ranked: iter(())),
    "other orders of ops": (pipeline_search, "unit_orders", lambda *a: _ORDERS(*a)[:1]),
}


def main(models: list[str]) -> None:
    """Print a line of JSON for each model, cluster and part."""
    for model in models:
        with capture_file(f"models/{model}.py") as session:
            graph = session.graph
        for cluster in CLUSTERS:
            for part, change in PARTS.items():
                start_s = time.process_time()
                with ExitStack() as stack:
                    if change:
                        stack.enter_context(patch.object(*change))
                    options = Options("auto", schedule=None, micro_batches=MICRO_BATCHES)
                    try:
                        plan = make_plan(graph, places()[cluster], Source(model), options)
                        found = [plan.schedule, plan.forecast.step_s]
                    except BigBrainError as error:
                        found = [error.code, None]
                row = [model, cluster, part, *found, round(time.process_time() - start_s, 2)]
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="of models/, as gpt")
    main(parser.parse_args().models)
