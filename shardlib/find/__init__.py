"""Rules found for models.

`axes` discovers the logical axes of a traced loss, `equivalence` collapses what repeats, `problem`
chooses the layout of every tensor by an integer program, with one rule for each name that a model
gives (`named_choices`), `names` writes it down as a table of rules, and `planned` reads that table
again for the partitioner. `why_not` asks what other rules would cost.
"""

from shardlib.find.api import find_rules as find_rules
from shardlib.find.found import FoundRules as FoundRules
