"""What all kernels for Hopper GPUs (sm_90a) are written in."""
