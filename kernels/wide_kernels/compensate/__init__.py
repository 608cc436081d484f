"""What stands in for skipped groups, added to the residual stream."""
