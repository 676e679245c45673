"""Published systems measured on the same work, in an environment of their own (see README.md here)."""
