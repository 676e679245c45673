"""Conversations that a model is shown before it learns by itself."""
