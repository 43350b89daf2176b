"""Hillstar: an inference server for conversations that last."""

__version__ = "0.1.0"
