"""Whether everything that a run needs is in order."""
