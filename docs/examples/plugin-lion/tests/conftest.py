from nnx.plugins.testing.fixtures import *  # noqa: F403
