"""Forecasts of whole clusters beside published measurements: rows, clusters, plans, errors.

`python -m tools.studies.published_clusters --data DIR` prints the table. Rows are others' and stay
where they are; graphs of the models are captured by `models` when they are asked for.
"""
