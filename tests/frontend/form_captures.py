"""What a capture makes of each form of tools/conformance/forms: a code, or the opaque parts of its
graph.

    python -m tests.frontend.form_captures     writes form_captures.json: read `git diff` then

A form is captured, its first batches are read and its optimizer is tried for two devices, in a copy
of this process. "fixed" are the entries of a batch that must stay as in the example. The rehearsal
of a form is in the table of `tools.conformance.forms`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from tools.conformance.apart import apart
from tools.conformance.coverage import warm
from tools.conformance.forms import Form, forms

TABLE = Path(__file__).with_name("form_captures.json")
_OPAQUE = ("leaf.", "forward.", "user.", "opaque.")


def outcome(form: Form) -> str:
    """Return the code of a refusal, or "graph" with its opaque parts and fixed entries."""
    with tempfile.TemporaryDirectory(prefix=f"capture-{form.name}-") as scratch:
        folder = Path(scratch)
        path = folder / "model.py"
        path.write_text(form.source)
        found = apart(lambda: {"outcome": _outcome(form, path)}, folder)
    return found.get("outcome") or found["detail"].partition("\n")[0]


def _outcome(form: Form, path: Path) -> str:
    from bigbrain_fx.frontend import CaptureService

    try:
        service = CaptureService(_wanted(form, path))
        graph = service.captured.graph
        if graph.training:
            service.serve({"do": "optimizer", "held": _halves(graph), "shards": (), "here": True})
    except BigBrainError as error:
        return error.code or "no code"
    opaque = sorted({op.target for op in graph.ops if op.target.startswith(_OPAQUE)})
    entries = cast("tuple[tuple[tuple[object, ...], object], ...]", service.fixed)
    fixed = [f"fixed {'.'.join(map(str, key))}" for key, _ in entries]
    size = "graph" if graph.static_batch is None else "graph of one size"
    return " ".join((size, *opaque, *fixed))


def _wanted(form: Form, path: Path) -> Mapping[str, object]:
    return {
        "location": str(path),
        "meta": False,
        "blank": False,
        "training": True,
        "seed": 0,
        "micro_batch": None,
        "assume": {},
        "leaves": list(form.leaves),
        "cache": 0,
        "quantize": None,
        "parts": form.micro_batches,
        "strict": False,
        "known": "",
        "environment": {},
        "graph": str(path.with_name("graph.json")),
    }


def _halves(graph: Graph) -> Mapping[str, list[str]]:
    """Return the trained parameters in two halves, as for two devices."""
    names = [p.name for p in graph.params if p.spec.requires_grad and p.name == p.canonical]
    half = (len(names) + 1) // 2
    return {"d0": names[:half], "d1": names[half:]}


def main() -> None:
    """Write the table of the forms that are named, or of all."""
    warm()
    wanted = [form for form in forms() if form.name in sys.argv[1:] or not sys.argv[1:]]
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for form in wanted:
        known[form.name] = outcome(form)
        print(f"{form.name:28} {known[form.name]}", flush=True)
    ordered = {form.name: known[form.name] for form in forms() if form.name in known}
    TABLE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
