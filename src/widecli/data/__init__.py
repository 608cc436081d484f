"""Text to token sequences: sources, packing, cache, order."""
