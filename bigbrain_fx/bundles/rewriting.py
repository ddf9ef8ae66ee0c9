"""Options that ask for rewrites -> a plan of the rewritten graph, each place of it proved.

    places ──▶ classes of alike places ──laid out, run both ways──▶ planned with and without

It knows who runs trials and who plans; what a rewrite is, `plan.rewriting` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.core import Graph, RewritePlace, RewriteProof, Rewritten
from bigbrain_fx.errors import CaptureError, InputError, NoPlanError
from bigbrain_fx.plan import (
    Compared,
    Options,
    Plan,
    layers_text,
    least_gap,
    rewrite_places,
    rewrite_trial,
    rewrites_of,
    rewritten_graph,
)

Planned = tuple[Plan, tuple[str, ...]]
Class = tuple[RewritePlace, ...]
Make = Callable[[FoundModel, Options], Planned]


def with_rewrites(found: FoundModel, options: Options, make: Make) -> Planned:
    """Plan, with what was asked for computed otherwise.

    Args:
        found: the captured model.
        options: whose `rewrite` says what may be.
        make: plans a model, and says what the user should know.

    Returns:
        A plan of whose rewritten places each was run both ways, and what the user should know.

    Raises:
        InputError: what was asked for by name is nowhere in the model, or does not go together.
        BigBrainError: as `make` does.
    """
    if not options.rewrite:
        return make(found, options)
    search = _Search(found, replace(options, tensor=1), make)
    classes = _classes(rewrite_places(found.graph, rewrites_of(options)))
    if "auto" in options.rewrite:
        return search.fastest(classes)
    _require_some(classes, options)
    return search.all_of(classes)


def _classes(found: Sequence[RewritePlace]) -> list[Class]:
    """Return places that are alike together: blocks that are alike stay so."""
    alike: dict[tuple[str, str], list[RewritePlace]] = {}
    for place in found:
        alike.setdefault((place.rewrite, place.alike), []).append(place)
    return [tuple(same) for same in alike.values()]


def _require_some(classes: Sequence[Sequence[RewritePlace]], options: Options) -> None:
    there = {place.rewrite for same in classes for place in same}
    lacking = [name for name in rewrites_of(options) if name not in there]
    if lacking:
        raise InputError(
            f"nothing in the model can be rewritten by {', '.join(lacking)}",
            code="BX3104",
            at="--rewrite",
            help=f"{_LACKS[lacking[0]]}; leave it out, or use --rewrite auto",
        )


_LACKS = {
    "linears": "it joins linear layers that read one value, whose weights nothing else reads: not "
    "those that are hooked, parametrized, tied, quantised, or inside a leaf",
    "scales": "it moves a number that alone reads a product of two values, where an operand is "
    "smaller than the product",
}


@dataclass
class _Search:
    """The classes of places that are kept so far: mutable, used once."""

    found: FoundModel
    options: Options
    make: Make
    kept: list[Class] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def all_of(self, classes: Sequence[Class]) -> Planned:
        """Plan with all of them; what cannot be, or fails its proof, is left as it is."""
        without, _ = self._planned([])
        for same in classes:
            if self._laid([*self.kept, same]) is not None:
                self.kept.append(same)
        while True:
            plan, notes = self._planned(self.kept)
            proofs = self._proofs(self.kept, plan.rows)
            pairs = list(zip(self.kept, proofs, strict=True))
            failed = [same for same, proof in pairs if not self._holds(same, proof)]
            if not failed:
                return self._shown(plan, proofs, [_without(without)]), (*notes, *self.said)
            self.kept = [same for same in self.kept if same not in failed]

    def fastest(self, classes: Sequence[Class]) -> Planned:
        """Plan without, and with one class more while that is faster by forecast.

        By more than forecasts can tell apart: the bits of one process are given up for it.
        """
        without, notes = self._planned([])
        plan, compared = without, []
        for same in classes:
            tried = self._tried(same)
            if tried is None:
                continue
            other, more = tried
            change = other.forecast.step_s / plan.forecast.step_s - 1
            pays = change < -least_gap(other.cluster) and self._holds(
                same, self._proofs([same], other.rows)[0]
            )
            word = "taken" if pays else "left as it is"
            compared.append(Compared(_said(same), other.forecast.step_s, f"{change:+.1%}: {word}"))
            if pays:
                plan, notes = other, more
                self.kept.append(same)
        if not self.kept:
            return replace(plan, compared=(*plan.compared, *compared)), (*notes, *self.said)
        proofs = self._proofs(self.kept, plan.rows)
        return self._shown(plan, proofs, [*compared, _without(without)]), (*notes, *self.said)

    def _tried(self, same: Class) -> Planned | None:
        """Plan with one class more; None where that cannot be."""
        if self._laid([*self.kept, same]) is None:
            return None
        try:
            return self._planned([*self.kept, same])
        except NoPlanError:  # joined weights are kept for each micro-batch in flight
            return None

    def _planned(self, classes: Sequence[Class]) -> Planned:
        graph = self._laid(classes)
        assert graph is not None
        places = [place for same in classes for place in same]
        known = tuple(Rewritten(p.rewrite, p.ops, p.layers) for p in places)
        source = replace(self.found.source, rewritten=known)
        return self.make(replace(self.found, graph=graph, source=source), self.options)

    def _laid(self, classes: Sequence[Class]) -> Graph | None:
        """Return the graph with these rewritten; None where the last cannot be, which is said."""
        if not classes:
            return self.found.graph
        places = [place for same in classes for place in same]
        fresh = tuple(op.name for place in places for op in place.made)
        if fresh not in self._known:
            graph = rewritten_graph(self.found.graph, places)
            try:
                self._known[fresh] = self.found.laid_out(graph, fresh)
            except CaptureError as error:
                self._known[fresh] = None
                self._leave(classes[-1], error.what)
        return self._known[fresh]

    @cached_property
    def _known(self) -> dict[tuple[str, ...], Graph | None]:
        """Return what was laid out, by the ops that were put in."""
        return {}

    def _proofs(self, classes: Sequence[Class], rows: int) -> list[RewriteProof]:
        """Run one place of each class both ways."""
        trials = [rewrite_trial(self.found.graph, same[0], rows) for same in classes]
        return self.found.prove(trials) if trials else []

    def _holds(self, same: Class, proof: RewriteProof) -> bool:
        """Whether a class computes the same; what does not is said."""
        if proof.why is not None:
            self._leave(same, proof.why)
        return proof.why is None

    def _leave(self, same: Class, why: str) -> None:
        self.said.append(f"{_said(same)}: stays as it is: {why}")

    def _shown(
        self, plan: Plan, proofs: Sequence[RewriteProof], compared: Sequence[Compared]
    ) -> Plan:
        """Return the plan with what the proofs have shown, and what it was compared with."""
        pairs = zip(self.kept, proofs, strict=True)
        shown = {place.ops: proof for same, proof in pairs for place in same}
        known = tuple(_proved(each, shown[each.ops]) for each in plan.source.rewritten)
        source = replace(plan.source, rewritten=known)
        return replace(plan, source=source, compared=(*plan.compared, *compared))


def _said(same: Class) -> str:
    """Name a class of places."""
    more = f" and {len(same) - 1} alike" if len(same) > 1 else ""
    return f"rewritten {same[0].rewrite}: {layers_text(same[0].layers)}{more}"


def _without(plan: Plan) -> Compared:
    return Compared("nothing rewritten", plan.forecast.step_s, "the bits of one process")


def _proved(each: Rewritten, proof: RewriteProof) -> Rewritten:
    return replace(each, apart=proof.apart, same_bits=proof.same_bits)
