"""A plan against a clock: machines, what instructions cost, what a process may use of a cluster."""
