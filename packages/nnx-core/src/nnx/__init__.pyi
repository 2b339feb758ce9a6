# What `from nnx import NAME` finds in core. Read at import to know the names,
# and by type checkers to know their types. Relative imports only, sorted.
from .plugins.hookspecs import hookimpl as hookimpl
from .records import NNEvaluationDataPoint as NNEvaluationDataPoint
from .records import NNIterationDataPoint as NNIterationDataPoint
from .records import ResumeStatus as ResumeStatus
