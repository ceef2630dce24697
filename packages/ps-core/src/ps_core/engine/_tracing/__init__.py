"""Record the moments of a pass, or trace them with fake tensors."""
