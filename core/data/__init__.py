"""From a data SPEC to batches: sources, scan, cache, loader."""
