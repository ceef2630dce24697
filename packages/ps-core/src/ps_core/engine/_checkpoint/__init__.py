"""Checkpoints and weights in files."""
