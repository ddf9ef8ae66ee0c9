"""Nouns in a notebook: a short repr, and their own text as the cell's output."""

from __future__ import annotations

import html


class Shown:
    """A noun whose `str` is for people; a dataclass of it says `repr=False`."""

    def __repr__(self) -> str:
        """Return one line: what it is, and the first line of its text."""
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
