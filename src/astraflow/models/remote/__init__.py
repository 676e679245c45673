"""Models that another service serves: how what they are asked and what they say becomes tokens."""
