"""A stage's ops -> nn.Module classes as the model's author wrote them. Knows no devices."""
