"""Prepare what the command ``pstar`` prints."""
