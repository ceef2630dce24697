"""Where gradients are, and what ``parameter.grad`` answers."""
