from .freezing import freeze as freeze
from .freezing import frozen as frozen
from .freezing import unfreeze as unfreeze
from .loading import LoadPretrainedResult as LoadPretrainedResult
from .loading import load_pretrained as load_pretrained
