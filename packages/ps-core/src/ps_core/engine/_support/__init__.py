"""Defer Ctrl-C, log lines, count, and wrap a module's calls."""
