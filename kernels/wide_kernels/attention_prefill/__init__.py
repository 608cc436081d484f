"""Attention over a prompt or a chunk of one, in which each token runs only some groups of query heads."""
