"""What goes wrong while a model is found, fetched, converted or loaded."""


class ModelError(Exception):
    """A model cannot be used as it is.

    The message is one line that names what was looked at (file, field, tensor), what was found
    and what is supported. It reaches the user as it is.
    """
