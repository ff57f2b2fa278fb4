"""What `core.engine` trains, step by step, and what is saved of it."""
