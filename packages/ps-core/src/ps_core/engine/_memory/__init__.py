"""Manage slots, chunks and tiers: which bytes are where."""
