"""The moments of a pass, recorded or traced with fake tensors."""
