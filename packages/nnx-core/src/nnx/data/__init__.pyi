from .base import NNDatasetBase as NNDatasetBase
from .loading import fast_batches as fast_batches
from .tabular import NNTabularDataset as NNTabularDataset
from .vision import NNDataset as NNDataset
