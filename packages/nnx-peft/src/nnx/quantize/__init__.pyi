from .ptq import quantize_int8 as quantize_int8
from .qat import QATLifecycleCallback as QATLifecycleCallback
from .qat import qat_train_step_factory as qat_train_step_factory
