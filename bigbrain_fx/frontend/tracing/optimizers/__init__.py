"""Trials of the user's optimizer and scheduler on made-up numbers, and the memory they hold."""
