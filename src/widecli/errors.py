"""The two ways a command ends badly. The message is one sentence about what happened plus what to do."""


class WideError(Exception):
    """The run failed; the message is shown alone (no traceback) and the process exits with `exit_code`."""

    exit_code = 1


class UsageError(WideError):
    """The command line, the recipe or the data it names cannot work as given (exit code 2)."""

    exit_code = 2


class Preempted(WideError):
    """The run was asked to stop, saved its state and can be resumed (exit code 75)."""

    exit_code = 75
