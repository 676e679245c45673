"""`astraflow init`: projects that run at once."""
