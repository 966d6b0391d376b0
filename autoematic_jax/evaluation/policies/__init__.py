"""What precision layers need step by step, and what policies give them."""
