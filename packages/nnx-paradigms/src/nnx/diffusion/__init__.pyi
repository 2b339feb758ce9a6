from .nets import DiffusionMLP as DiffusionMLP
from .nets import sinusoidal_time_embed as sinusoidal_time_embed
from .sampling import sample as sample
from .schedules import NoiseSchedule as NoiseSchedule
from .schedules import NoiseSchedulers as NoiseSchedulers
from .training import DiffusionObjective as DiffusionObjective
from .training import diffusion_objective as diffusion_objective
from .training import diffusion_train_step_factory as diffusion_train_step_factory
