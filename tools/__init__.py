"""Scripts for people who work on bigbrain-fx or measure it; not installed."""
