"""What is tried before a run: learning rates, batch sizes, a few steps, a step of every model."""
