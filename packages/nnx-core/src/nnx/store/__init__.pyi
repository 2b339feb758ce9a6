from .checkpoint import NNCheckpoint as NNCheckpoint
from .checkpoint import NNCheckpointTransform as NNCheckpointTransform
from .errors import ResumePointError as ResumePointError
from .errors import RunBusyError as RunBusyError
from .points import ResumePoint as ResumePoint
from .points import read_point as read_point
from .run import NNRun as NNRun
from .writer import RunWriter as RunWriter
