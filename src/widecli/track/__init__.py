"""Where a run is recorded."""
