"""The reward of digits.toml."""


def share_of_digits(completion, task):
    """How much of the reply is digits, 0 to 1."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
