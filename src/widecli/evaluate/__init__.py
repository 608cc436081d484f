"""Perplexity and task accuracy."""
