from .gguf import map_tensors as map_tensors
from .gguf import write_gguf as write_gguf
from .huggingface import from_transformers as from_transformers
from .huggingface import to_transformers as to_transformers
from .ollama import export_ollama_modelfile as export_ollama_modelfile
from .parity import ParityError as ParityError
