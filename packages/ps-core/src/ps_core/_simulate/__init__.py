"""Predict the time of a plan: machines, costs of instructions, and a process's part of a cluster."""
