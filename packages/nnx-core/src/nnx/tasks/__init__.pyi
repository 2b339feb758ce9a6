from .accumulator import TaskMetricAccumulator as TaskMetricAccumulator
from .adapters import TaskAdapter as TaskAdapter
from .adapters import TaskValidationError as TaskValidationError
from .adapters import task_adapter as task_adapter
from .spec import TaskSpec as TaskSpec
