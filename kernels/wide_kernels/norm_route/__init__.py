"""RMSNorm and the router's decision in one pass over the residual stream."""
