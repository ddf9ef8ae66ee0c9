"""Solvers of public placement instances by largest load. No plan of the product uses them."""
