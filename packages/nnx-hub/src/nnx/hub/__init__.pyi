from .exporting import ExportError as ExportError
from .loading import PretrainedInfo as PretrainedInfo
from .loading import inspect_pretrained as inspect_pretrained
from .publishing import pull_run as pull_run
from .publishing import push_run as push_run
