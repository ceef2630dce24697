"""An accelerator that the CPU plays, which checks that all memory is used in order."""
