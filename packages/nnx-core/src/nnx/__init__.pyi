# What `from nnx import NAME` finds in core. Read at import to know the names,
# and by type checkers to know their types. Relative imports only, sorted.
from .components import ComponentRegistry as ComponentRegistry
from .components import ComponentRestoreError as ComponentRestoreError
from .components import ComponentSpec as ComponentSpec
from .components import StatefulComponent as StatefulComponent
from .plugins.hookspecs import hookimpl as hookimpl
from .precision import PrecisionPolicy as PrecisionPolicy
from .precision import PrecisionUnsupportedError as PrecisionUnsupportedError
from .precision import ResolvedPrecision as ResolvedPrecision
from .precision import precision_support as precision_support
from .records import NNEvaluationDataPoint as NNEvaluationDataPoint
from .records import NNIterationDataPoint as NNIterationDataPoint
from .records import ResumeStatus as ResumeStatus
from .seeding import dataloader_worker_init_fn as dataloader_worker_init_fn
from .seeding import env_snapshot as env_snapshot
from .seeding import set_seed as set_seed
