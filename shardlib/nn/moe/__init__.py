"""Mixtures of experts: routing, dispatch with or without drops, exchange over a mesh, balancing."""

from shardlib.nn.moe.balance import balance_biases as balance_biases
from shardlib.nn.moe.capacity import capacity as capacity
from shardlib.nn.moe.exchange import Method as Method
from shardlib.nn.moe.exchange import exchange as exchange
from shardlib.nn.moe.exchange import plan_exchange as plan_exchange
from shardlib.nn.moe.experts import Dispatch as Dispatch
from shardlib.nn.moe.experts import apply_experts as apply_experts
from shardlib.nn.moe.routing import Groups as Groups
from shardlib.nn.moe.routing import Routing as Routing
from shardlib.nn.moe.routing import Scores as Scores
from shardlib.nn.moe.routing import route as route
from shardlib.nn.moe.statistics import RouterStats as RouterStats
from shardlib.nn.moe.statistics import router_losses as router_losses
from shardlib.nn.moe.statistics import router_stats as router_stats
from shardlib.nn.moe.weights import TAGS as TAGS
from shardlib.nn.moe.weights import ExpertWeights as ExpertWeights
from shardlib.nn.moe.weights import Glu as Glu
from shardlib.nn.moe.weights import gated as gated
