from .tables import Utils as Utils
from .tables import flatten_dict as flatten_dict
from .tables import print_table as print_table
from .tables import print_tree as print_tree
