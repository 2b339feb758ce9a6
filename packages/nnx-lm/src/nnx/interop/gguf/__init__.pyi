from .tensor_name_map import map_tensors as map_tensors
from .writer import SUPPORTED_QUANTIZATIONS as SUPPORTED_QUANTIZATIONS
from .writer import write_gguf as write_gguf
