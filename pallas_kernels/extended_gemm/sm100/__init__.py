"""Operands and kernel of the GEMM on Blackwell's block-scaled tensor cores."""
