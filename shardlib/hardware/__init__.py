"""Chips, their links and clusters: compute, memory and bandwidth."""

from shardlib.hardware.chips import CHIPS as CHIPS
from shardlib.hardware.chips import Chip as Chip
from shardlib.hardware.clusters import Cluster as Cluster
from shardlib.hardware.clusters import MixedCluster as MixedCluster
from shardlib.hardware.clusters import chip_for as chip_for
from shardlib.hardware.clusters import cluster_of as cluster_of
from shardlib.hardware.clusters import is_mixed as is_mixed
from shardlib.hardware.clusters import of_one_kind as of_one_kind
from shardlib.hardware.clusters import parse_cluster as parse_cluster
from shardlib.hardware.clusters import parse_mixed as parse_mixed
from shardlib.hardware.clusters import slice_of as slice_of
