"""GEMM-K: a projection whose input channels are routed."""
