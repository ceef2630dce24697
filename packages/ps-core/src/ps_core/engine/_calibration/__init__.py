"""What `pstar doctor --calibrate` measures, thing by thing."""
