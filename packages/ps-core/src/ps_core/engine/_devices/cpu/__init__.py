"""The device of "cpu" and "emulated", whose work the CPU does."""
