"""A user's file as a module, run from its text as `python file.py` runs it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _FromText(SourceFileLoader):
    """Compile the text each time.

    Python's cache in `__pycache__` knows a text by its length and the second in which it was
    written: of two edits within a second, the first would be run twice.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Return the compiled text of the file as it is now."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def module_of(path: Path, name: str) -> ModuleType:
    """Return an empty module for a file; `run_module` fills it."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromText(name, str(path)))
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def run_module(module: ModuleType) -> None:
    """Run the file of a module from `module_of`; whatever it raises is raised."""
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
