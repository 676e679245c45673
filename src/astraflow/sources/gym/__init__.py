"""Generators of reasoning-gym: what runs in a process of its own (`host`), and the source (`source`)."""
