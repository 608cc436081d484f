"""The fast inference path: a compact forward pass on `wide_kernels`, dense and routed through the same code."""
