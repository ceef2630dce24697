"""Execute a plan on real bytes: in pure Python, on several simulated processes, in every order that it allows."""
