"""Answers of mathematics: found (`boxed`), compared as written (`forms`), else by computer algebra (`verifier`)."""
