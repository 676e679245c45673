"""Answers of mathematics: compared as written (`forms`), else by computer algebra (`verifier`)."""
