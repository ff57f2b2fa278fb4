"""What a browser may name and send."""
