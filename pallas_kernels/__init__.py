"""Operations, each with a slow exact reference and fast implementations."""
