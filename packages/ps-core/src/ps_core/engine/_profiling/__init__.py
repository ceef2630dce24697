"""Record when each queue of a model works: `_profiling.profile` has what users call."""
