"""Flows, the command line and the local server."""
