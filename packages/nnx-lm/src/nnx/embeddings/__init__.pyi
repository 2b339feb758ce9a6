from .contrastive import ContrastiveTextDataset as ContrastiveTextDataset
from .contrastive import pair_collate as pair_collate
from .contrastive import (
    text_contrastive_train_step_factory as text_contrastive_train_step_factory,
)
from .contrastive import train_contrastive as train_contrastive
from .encoder import TokenEncoder as TokenEncoder
from .encoding import embed_texts as embed_texts
from .export import export_to_faiss as export_to_faiss
from .export import export_to_safetensors as export_to_safetensors
from .export import search_faiss as search_faiss
