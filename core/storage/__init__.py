"""What lies in the run store, and how it gets there and back."""
