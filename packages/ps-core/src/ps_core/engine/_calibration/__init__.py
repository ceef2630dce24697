"""Run the probes of `pstar doctor --calibrate`, one module for each kind of work."""
