"""A second name for a package: the checkout has at its top what a wheel has in `bigbrain_fx`."""

from __future__ import annotations

import importlib
import pkgutil
import sys


def alias_package(alias: str, package: str) -> None:
    """Let `import alias` and `import alias.module` give the modules of `package`, not copies.

    Args:
        alias: name of the module that is being imported and stands for the package.
        package: name of the package; all its modules are imported.
    """
    found = importlib.import_module(package)
    for each in pkgutil.iter_modules(getattr(found, "__path__", ())):
        sys.modules[f"{alias}.{each.name}"] = importlib.import_module(f"{package}.{each.name}")
    sys.modules[alias] = found
