from .result import PredictionResult as PredictionResult
from .result import PredictResult as PredictResult
from .result import prediction_from_logits as prediction_from_logits
from .spec import PredictionValidationError as PredictionValidationError
from .spec import ProbabilitySpec as ProbabilitySpec
