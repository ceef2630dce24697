"""The optimizer's interface, a group's step, and clipping or skipping."""
