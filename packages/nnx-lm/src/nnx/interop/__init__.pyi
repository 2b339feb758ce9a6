from .adapters import adapter_to_transformers as adapter_to_transformers
from .gguf import map_tensors as map_tensors
from .gguf import write_gguf as write_gguf
from .ollama import export_ollama_modelfile as export_ollama_modelfile
from .parity import ParityError as ParityError
from .reading import from_transformers as from_transformers
from .writing import to_transformers as to_transformers
