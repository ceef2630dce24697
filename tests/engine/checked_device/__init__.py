"""A device on the CPU that checks the order of everything that is launched on it; see docs/ordering.md."""
