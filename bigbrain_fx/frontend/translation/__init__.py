"""A torch.export program -> `Graph`: ops, names, sizes, costs, and lines of the user's source."""
