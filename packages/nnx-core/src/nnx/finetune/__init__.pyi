from .freezing import freeze as freeze
from .freezing import frozen as frozen
from .freezing import unfreeze as unfreeze
from .loading import LoadPretrainedResult as LoadPretrainedResult
from .loading import load_pretrained as load_pretrained
from .param_groups import NNParamGroupSpec as NNParamGroupSpec
from .param_groups import build_param_groups as build_param_groups
