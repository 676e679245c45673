"""Between a rollout node and those who play episodes elsewhere."""
