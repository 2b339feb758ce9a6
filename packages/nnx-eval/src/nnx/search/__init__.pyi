from .outcomes import SearchBudget as SearchBudget
from .outcomes import SearchResult as SearchResult
from .outcomes import TrialOutcome as TrialOutcome
from .space import CategoricalParam as CategoricalParam
from .space import FloatParam as FloatParam
from .space import IntParam as IntParam
from .space import SearchSpace as SearchSpace
from .study import search as search
