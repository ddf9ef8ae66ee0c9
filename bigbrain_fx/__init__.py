"""Split a PyTorch model over the devices of a cluster and write plain Python for each."""

__version__ = "0.1.0"
