"""The version of bigbrain-fx; pyproject.toml says the same."""

VERSION = "0.3.0"
