"""Slots, chunks and tiers: who has which bytes."""
