"""Errors and warnings for the user, each in one line."""


class InputError(ValueError):
    """The user's input cannot be used; the message is one line that says what is wrong or what to do."""


class RoomError(InputError):
    """A request that does not fit into the memory; `room` new tokens would, or none if it is 0."""

    def __init__(self, message: str, room: int):
        super().__init__(message)
        self.room = room


class UserNote(UserWarning):
    """A warning that the command line prints as a note, once for each text."""


class HeadWarning(UserNote):
    """A warning about a draft head or another drafter."""


class InexactWarning(UserNote):
    """Text in half precision may differ from plain decoding's, although exact passes are on."""
