"""CUDA behind one small seam."""
