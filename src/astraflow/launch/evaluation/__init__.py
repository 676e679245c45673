"""`astraflow eval`: tasks played k times by one model or several, kept as they end, and what they say."""
