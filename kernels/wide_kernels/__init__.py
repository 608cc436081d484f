"""Operators that make skipping pay. They know tensors and masks, nothing about models."""
