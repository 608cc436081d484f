"""Text to token sequences: where the text comes from, how it is packed and cached, in which order it is read.

`sources` opens what a recipe names, `tokens` turns it into a memory-mapped `TokenSet`, `stream` says which sequences
a step sees.
"""
