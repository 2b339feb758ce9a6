from .magnitude import magnitude_prune as magnitude_prune
from .semi_structured import semi_structured_24 as semi_structured_24
