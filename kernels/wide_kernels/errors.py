"""What the operators refuse."""


class UnsupportedError(ValueError):
    """An operator or the backend asked for cannot take this dtype, shape, layout or device; the message names it."""
