"""Inference of decoders: many prompts at once, with bits that do not depend on other requests.

`page_pool` and `scheduler` decide what a step works on, `programs` compiles it for the model of
`weights` and `adapters`, `sampling` draws its tokens, after `adjustment` and `grammars`, and
`engine` runs it.
"""

from shardlib.engine.answering import EngineStats as EngineStats
from shardlib.engine.answering import Request as Request
from shardlib.engine.engine import Engine as Engine
from shardlib.engine.requests import Completion as Completion
from shardlib.engine.requests import Grammar as Grammar
from shardlib.engine.requests import Sampling as Sampling
from shardlib.engine.requests import Token as Token
