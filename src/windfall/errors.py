"""What a person did wrong, in a line."""


class InputError(ValueError):
    """Something a person gave us cannot be used; the message is one line that says what would be right."""
