"""The two programs inside boxes: standard library of Python 3.9 only. They are sent into a box when it starts."""
