"""Reading model files and writing converted checkpoints."""
