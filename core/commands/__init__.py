"""The words of the command line, and its larger commands."""
