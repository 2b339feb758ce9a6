from .call import Data as Data
from .call import Network as Network
from .call import fit as fit
from .data import Batches as Batches
from .fitted import Fitted as Fitted
