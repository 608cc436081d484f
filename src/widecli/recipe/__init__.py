"""Recipes: the typed schema and how files, overrides and flags become one."""
