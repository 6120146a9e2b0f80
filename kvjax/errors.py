"""The error that a user's mistake raises: one line saying what was given, what was expected, and where."""


class UserError(ValueError):
    """Bad input from the user. The message is one line; the command-line programs print it alone and exit with 2."""
