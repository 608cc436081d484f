"""Measurements, and the machine they were taken on."""
