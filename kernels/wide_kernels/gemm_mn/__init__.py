"""GEMM-MN: a projection whose output channels are routed, plain or as the fused gate/up half of an MLP."""
