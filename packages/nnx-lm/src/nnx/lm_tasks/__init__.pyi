from .batches import LMTaskError as LMTaskError
from .task import ALIGNMENTS as ALIGNMENTS
from .task import CausalLMEval as CausalLMEval
from .task import CausalLMObjective as CausalLMObjective
from .task import CausalLMTask as CausalLMTask
from .task import causal_lm as causal_lm
from .task import perplexity as perplexity
