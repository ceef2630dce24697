"""A plan on real bytes: single precision in pure Python, several processes, every order a plan allows."""
