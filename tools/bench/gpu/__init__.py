"""One GPU measured beside its forecasts: `python -m tools.bench gpu`."""
