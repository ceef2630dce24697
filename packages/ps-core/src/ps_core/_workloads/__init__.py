"""Describe what is trained: named shapes, traces computed from shapes, Hugging Face configurations."""
