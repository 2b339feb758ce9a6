"""Continuing from a checkpoint: find it, check everything, restore all of it or nothing."""

from nnx.engine.resume.check import ResumeError

__all__ = ["ResumeError"]
