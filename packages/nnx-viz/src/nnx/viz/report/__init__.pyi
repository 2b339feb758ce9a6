from .page import notebook_chart as notebook_chart
from .page import write_report as write_report
from .reading import RunView as RunView
from .reading import read_run as read_run
