"""Forecasts of published measurements on GPUs: captured graphs, rows, errors.

`python -m tools.bench published_gpus --data DIR` prints the table; it needs no torch and no GPU.
The data are others' and stay where they are; graphs of the models, which `capturing` makes, are
kept here.
"""
