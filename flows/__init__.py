"""What runs, and in which order."""
