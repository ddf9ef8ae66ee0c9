"""Ops -> the calls that a person would write for them. Knows no module and no stage."""
