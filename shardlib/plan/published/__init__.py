"""Published runs, read as cases of the cost model."""

from shardlib.plan.published.case import Case as Case
from shardlib.plan.published.case import read as read
from shardlib.plan.published.case import read_file as read_file
from shardlib.plan.published.model import Unusable as Unusable
