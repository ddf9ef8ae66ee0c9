"""nn.Module -> a checked torch.export program, and the plain runs that it is held against."""
