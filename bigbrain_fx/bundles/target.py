"""Folder of a bundle, and its extras beside the needs of its plan: `--with mpi,suspicion`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bigbrain_fx.emit import EXTRAS, SESSION, Weights, check_out, is_chain, write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan


@dataclass(frozen=True)
class Target:
    """A bundle to be written.

    Attributes:
        out: its folder.
        force: replace a bundle that is there.
        lean: without what replaces processes that die.
        bare: the plain pipeline alone.
        extras: files that a run may want and no plan needs, of `EXTRAS`.
    """

    out: Path
    force: bool = False
    lean: bool = False
    extras: tuple[str, ...] = ()
    bare: bool = False

    def require(self) -> None:
        """Refuse, before anything is captured, what could not be written.

        Raises:
            InputError: the folder is taken or cannot be written; no bundle has such extras.
        """
        check_out(self.out, force=self.force)
        _require_writable(self.out)
        unknown = [name for name in self.extras if name not in (*EXTRAS, SESSION)]
        if unknown:
            raise InputError(
                f"no bundle can have {', '.join(unknown)}: --with takes {', '.join(EXTRAS)}",
                code="BX3161",
                help=f"write --with {EXTRAS[0]}, say",
            )

    def write(
        self,
        plan: Plan,
        weights: Weights,
        check: Callable[[Path], None] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Write it; `check` is asked of the folder before it is moved to its place.

        `more`: extras that nobody asked for and the model file needs.

        Raises:
            InputError: the plan has no use for what was asked for.
        """
        self._require_training(plan)
        self._require_extras(plan)
        out = Path(os.path.abspath(self.out))
        write = partial(write_bundle, plan, weights, out, force=self.force, check=check)
        write(lean=self.lean, bare=self.bare, extras=(*self.extras, *more))

    def _require_training(self, plan: Plan) -> None:
        """Refuse for inference what only training has."""
        if plan.mode == "train":
            return
        if self.lean:
            raise InputError(
                "--lean is for training: a bundle for inference replaces no process anyway",
                code="BX3010",
                help="leave --lean out",
            )
        if self.extras:
            raise InputError(
                f"--with {','.join(self.extras)} is for training, and this bundle infers",
                code="BX3162",
                help="leave --with out",
            )

    def _require_extras(self, plan: Plan) -> None:
        supervised = [name for name in ("hosts", "suspicion", "watch") if name in self.extras]
        if supervised and self.lean:
            raise InputError(
                f"--with {supervised[0]} is for processes that are replaced, and a lean bundle "
                "replaces none",
                code="BX3163",
                help="leave --lean out",
            )
        if "pipelining" in self.extras and not is_chain(plan):
            raise InputError(
                "--with pipelining is for one chain of stages with one version of the weights",
                code="BX3164",
                help="leave --with pipelining out, or split with --schedule 1f1b and neither "
                "--tensor-parallel nor --replicas",
            )


def _require_writable(out: Path) -> None:
    """Find out now, not after a long capture."""
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(
            f"cannot write {out}: {folder} is not a folder",
            code="BX3021",
            help="give another --out",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {out}: no permission to write in {folder}",
            code="BX3022",
            help="give another --out",
        )
