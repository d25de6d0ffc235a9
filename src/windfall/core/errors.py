"""Errors and warnings for the user, each in one line."""


class InputError(ValueError):
    """The user's input cannot be used; the message is one line that says what is wrong or what to do."""


class UserNote(UserWarning):
    """A warning that the command line prints as a note, once for each text."""


class HeadWarning(UserNote):
    """A warning about a draft head or another drafter."""


class InexactWarning(UserNote):
    """Text in half precision may differ from plain decoding's, although exact passes are on."""
