"""Token-level dynamic width pruning: calibrate, evaluate, measure. See README.md."""

__version__ = "0.2.0"
