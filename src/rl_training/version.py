"""The version of this library, in a root module so that every layer can import it."""

__version__ = "0.2.0"
