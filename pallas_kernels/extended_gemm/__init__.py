"""Mixed-precision GEMM over AutoFP weights."""
