"""Implement the optimizer: its interface, a group's step, and clipping or skipping."""
