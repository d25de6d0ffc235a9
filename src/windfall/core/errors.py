"""What a person did wrong, in a line."""


class InputError(ValueError):
    """Something a person gave us cannot be used; the message is one line that says what would be right."""


class HeadWarning(UserWarning):
    """Something about a draft head or another drafter that its user should know; commands print it as a note."""
