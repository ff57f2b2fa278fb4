"""The dashboard with its way to the outside: a server and a tunnel, kept alive and ended together."""
