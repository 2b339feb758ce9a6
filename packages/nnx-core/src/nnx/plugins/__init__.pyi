from .hookspecs import hookimpl as hookimpl
from .manager import LoadedPlugin as LoadedPlugin
from .manager import PluginManager as PluginManager
from .manager import PluginWarning as PluginWarning
from .registry import Registry as Registry
from .registry import RegistryConflictError as RegistryConflictError
from .registry import UnknownIdError as UnknownIdError
from .siblings import install_line as install_line
