"""Data sets of others: files found and read (`reading`), fields picked (`fields`), the source (`dataset`)."""
