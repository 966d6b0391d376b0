"""A small reference model with true bfloat16 weights, and how it is made."""
