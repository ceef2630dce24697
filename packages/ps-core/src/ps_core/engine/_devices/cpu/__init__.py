"""Run the "cpu" and "emulated" devices, where the CPU does all work."""
