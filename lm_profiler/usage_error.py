"""The one exception for what was asked for and cannot be had."""


class UsageError(ValueError):
    """A wrong option or call: a line or two of subject, expected, given and remedy, for whoever wrote it."""
