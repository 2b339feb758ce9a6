from .accumulator import TaskMetricAccumulator as TaskMetricAccumulator
from .adapter import TaskAdapter as TaskAdapter
from .adapter import TaskValidationError as TaskValidationError
from .adapters import task_adapter as task_adapter
from .spec import TaskSpec as TaskSpec
