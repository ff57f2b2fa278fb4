"""What this machine is, what it has and what it does meanwhile."""
