"""A grid of runs: which points it has, what runs when, on which device. Each run is a command of its own."""
