"""Run the engine on CUDA devices, through one small interface."""
