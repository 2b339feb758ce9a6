from .activation import activation_map as activation_map
from .attribution import attribute as attribute
from .export import netron_export as netron_export
from .gradients import gradient_flow as gradient_flow
from .layers import summary as summary
from .trust import reliability as reliability
from .trust import risk_coverage as risk_coverage
from .weights import weight_histogram as weight_histogram
