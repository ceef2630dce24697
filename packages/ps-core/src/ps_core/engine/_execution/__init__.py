"""Run passes, drivers and plans, and hook them into a model."""
