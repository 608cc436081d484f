"""Attention of one new token a sequence against its cache, in which each token runs only some groups of heads."""
