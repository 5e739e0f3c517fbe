"""Losses as weighted sums that are exact under microbatches, padding and any sharding."""

from shardlib.losses.aggregate import Mean as Mean
from shardlib.losses.chunked import chunked_cross_entropy as chunked_cross_entropy
from shardlib.losses.weighted import cross_entropy as cross_entropy
from shardlib.losses.weighted import masked_mean as masked_mean
