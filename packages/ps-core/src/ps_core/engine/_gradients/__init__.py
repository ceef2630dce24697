"""Store gradients, and answer ``parameter.grad``."""
