"""Lines of the user's files that a trace treats apart: queries of data, log lines, `.data`."""
