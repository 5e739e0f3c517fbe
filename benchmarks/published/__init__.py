"""Published runs, read as cases of the cost model."""

from published.case import Case as Case
from published.case import read as read
from published.case import read_file as read_file
from published.model import Unusable as Unusable
