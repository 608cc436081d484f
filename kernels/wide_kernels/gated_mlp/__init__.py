"""A whole gated MLP whose hidden channels are routed."""
