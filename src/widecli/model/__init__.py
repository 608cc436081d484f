"""Routing on top of a Hugging Face causal LM."""
