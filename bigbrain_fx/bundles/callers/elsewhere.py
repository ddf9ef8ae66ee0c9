"""Names of a loop in plain PyTorch that a session has not: each says what to do instead."""

from __future__ import annotations


class Elsewhere:
    """A name of a loop in plain PyTorch, for what the devices have."""

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy

    def __set_name__(self, _owner: type, name: str) -> None:
        self.name = name

    def __get__(self, session: object, _owner: type) -> Elsewhere:
        if session is not None:
            raise AttributeError(f"a session has no `{self.name}`: {self.remedy}")
        return self

    def __set__(self, _session: object, _value: object) -> None:
        raise AttributeError(f"a session has no `{self.name}`: {self.remedy}")
