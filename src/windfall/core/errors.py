"""Errors and warnings for the user, each in one line."""


class InputError(ValueError):
    """The user's input cannot be used; the message is one line that says what is wrong or what to do."""


class HeadWarning(UserWarning):
    """A warning about a draft head or another drafter; the command line prints it as a note."""
