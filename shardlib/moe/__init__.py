"""Mixtures of experts: routing, dispatch with and without drops, exchange over a mesh, balance."""

from shardlib.moe.balance import balance_biases as balance_biases
from shardlib.moe.capacity import capacity as capacity
from shardlib.moe.exchange import Method as Method
from shardlib.moe.exchange import exchange as exchange
from shardlib.moe.exchange import plan_exchange as plan_exchange
from shardlib.moe.experts import Dispatch as Dispatch
from shardlib.moe.experts import apply_experts as apply_experts
from shardlib.moe.routing import Routing as Routing
from shardlib.moe.routing import Scores as Scores
from shardlib.moe.routing import route as route
from shardlib.moe.statistics import RouterStats as RouterStats
from shardlib.moe.statistics import router_losses as router_losses
from shardlib.moe.statistics import router_stats as router_stats
from shardlib.moe.weights import TAGS as TAGS
from shardlib.moe.weights import Activation as Activation
from shardlib.moe.weights import ExpertWeights as ExpertWeights
