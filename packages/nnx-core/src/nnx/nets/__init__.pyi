from .conv import ConvNN as ConvNN
from .feed_fwd import FeedFwdNN as FeedFwdNN
