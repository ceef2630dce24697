"""Models before they have memory: traced on fake tensors, and given their initial values."""
