"""Tile shapes: how they are chosen and how a benchmark forces others."""
