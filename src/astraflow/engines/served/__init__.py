"""Engines that are a server process of their own: what is common to them. One folder beside this for each kind."""
