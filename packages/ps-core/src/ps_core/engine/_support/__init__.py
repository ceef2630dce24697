"""Ctrl-C, log lines, counters, wrapping a module's call."""
