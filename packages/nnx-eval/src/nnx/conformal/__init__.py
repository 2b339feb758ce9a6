"""Sets and intervals that hold the truth with a promised probability.

Split conformal prediction (Vovk et al., 2005; Lei et al., 2018; Angelopoulos &
Bates, 2023): calibration rows that are exchangeable with the rows to predict
turn any score into a guarantee that needs no further assumption.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
