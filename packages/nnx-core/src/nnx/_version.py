"""The version that every NNx distribution shares."""

__version__ = "0.1.0"
