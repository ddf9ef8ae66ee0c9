"""Options that ask for rewrites -> a plan of the rewritten graph, each place of it proved.

    places ──▶ classes of alike places ──laid out, run both ways──▶ planned with and without

It knows who runs trials and who plans; what a rewrite is, `plan.rewriting` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.core import Graph, RewritePlace, RewriteProof, Rewritten
from bigbrain_fx.errors import CaptureError, InputError, NoPlanError
from bigbrain_fx.plan import (
    Compared,
    Options,
    Plan,
    require_rewritable,
    rewrites_of,
    rewrite_places,
    rewrite_trial,
    rewritten_graph,
)

WORTH = 0.002
"""By which share a step must be faster for "auto" to give up the bits of one process."""

Planned = tuple[Plan, tuple[str, ...]]
Make = Callable[[FoundModel], Planned]


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
        return make(found)
    require_rewritable(options)
    search = _Search(found, make)
    classes = _classes(rewrite_places(found.graph, rewrites_of(options)))
    if "auto" in options.rewrite:
        return search.fastest(classes)
    _require_some(classes, options)
    return search.all_of(classes)


def _classes(found: Sequence[RewritePlace]) -> list[tuple[RewritePlace, ...]]:
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
            at="--rewrite",
            help=f"{_LACKS[lacking[0]]}; leave it out, or use --rewrite auto",
        )


_LACKS = {
    "linears": "it joins linear layers that read one value, whose weights nothing else reads: not "
    "those that are hooked, parametrized, tied, quantised, or inside a leaf",
    "scales": "it moves a number that alone reads a product of two values, where an operand is "
    "smaller than the product",
    "norms": "it folds a BatchNorm that alone reads a convolution, with --mode eval",
}


@dataclass
class _Search:
    """The places that are kept so far: mutable, used once."""

    found: FoundModel
    make: Make
    kept: tuple[RewritePlace, ...] = ()
    said: list[str] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)

    def all_of(self, classes: Sequence[tuple[RewritePlace, ...]]) -> Planned:
        """Plan with all of them; what fails its proof is left as it is."""
        left = list(classes)
        while True:
            kept = [same for same in left if self._laid((*self.kept, *same))]
            self.kept = tuple(place for same in kept for place in same)
            plan, notes = self._planned(self.kept)
            proofs = self._proofs(kept, plan.rows)
            left = [same for same, proof in zip(kept, proofs, strict=True) if not self._no(same, proof)]
            if len(left) == len(kept):
                return self._with(plan, kept, proofs), (*notes, *self.said)
            self.kept = ()

    def fastest(self, classes: Sequence[tuple[RewritePlace, ...]]) -> Planned:
        """Plan without, and with one class more while that is faster by forecast."""
        plan, notes = self._planned(())
        chosen: list[tuple[RewritePlace, ...]] = []
        without_s = plan.forecast.step_s
        for same in classes:
            tried = self._tried((*self.kept, *same))
            what = f"rewritten: {same[0].rewrite}, {', '.join(same[0].layers)} x{len(same)}"
            if tried is None:
                continue
            other, more = tried
            change = other.forecast.step_s / plan.forecast.step_s - 1
            takes = change < -WORTH
            if takes and not self._no(same, self._proofs([same], other.rows)[0]):
                plan, notes, self.kept = other, more, (*self.kept, *same)
                chosen.append(same)
            why = f"{change:+.1%}: {'taken' if same in chosen else 'left as it is'}"
            self.compared.append(Compared(what, other.forecast.step_s, why))
        compared = (*plan.compared, *self.compared)
        if chosen:
            compared = (*compared, Compared("nothing rewritten", without_s, ""))
        proofs = self._proofs(chosen, plan.rows)
        plan = replace(self._with(plan, chosen, proofs), compared=compared)
        return plan, (*notes, *self.said)

    def _tried(self, chosen: tuple[RewritePlace, ...]) -> Planned | None:
        if self._laid(chosen) is None:
            return None
        try:
            return self._planned(chosen)
        except NoPlanError:  # joined weights are kept for each micro-batch in flight
            return None

    def _planned(self, chosen: tuple[RewritePlace, ...]) -> Planned:
        graph = self._laid(chosen)
        assert graph is not None
        known = tuple(Rewritten(p.rewrite, p.ops, p.layers) for p in chosen)
        source = replace(self.found.source, rewritten=known)
        return self.make(replace(self.found, graph=graph, source=source))

    def _laid(self, chosen: tuple[RewritePlace, ...]) -> Graph | None:
        """Return the graph with these places rewritten; None where it cannot be, which is said."""
        if not chosen:
            return self.found.graph
        fresh = [op.name for place in chosen for op in place.made]
        try:
            return self.found.laid_out(rewritten_graph(self.found.graph, chosen), fresh)
        except CaptureError as error:
            self._leave(chosen[-1:], error.what)
            return None

    def _proofs(
        self, classes: Sequence[tuple[RewritePlace, ...]], rows: int
    ) -> list[RewriteProof]:
        """Run one place of each class both ways."""
        trials = [rewrite_trial(self.found.graph, same[0], rows) for same in classes]
        return self.found.prove(trials) if trials else []

    def _no(self, same: Sequence[RewritePlace], proof: RewriteProof) -> bool:
        """Whether a class failed its proof, which is said."""
        if proof.why is not None:
            self._leave(same, proof.why)
        return proof.why is not None

    def _leave(self, same: Sequence[RewritePlace], why: str) -> None:
        layers = ", ".join(same[0].layers)
        self.said.append(f"{layers} ({same[0].rewrite}) stays as it is: {why}")

    def _with(
        self,
        plan: Plan,
        classes: Sequence[tuple[RewritePlace, ...]],
        proofs: Sequence[RewriteProof],
    ) -> Plan:
        """Return the plan with what the proofs have shown."""
        shown = {
            place.ops: proof
            for same, proof in zip(classes, proofs, strict=True)
            for place in same
        }
        known = tuple(_proved(each, shown[each.ops]) for each in plan.source.rewritten)
        return replace(plan, source=replace(plan.source, rewritten=known))


def _proved(each: Rewritten, proof: RewriteProof) -> Rewritten:
    return replace(each, apart=proof.apart, same_bits=proof.same_bits)
