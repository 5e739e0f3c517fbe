"""Requests in the format of the OpenAI API, answered by the engine."""

from shardlib.serve.batch import BatchCard as BatchCard
from shardlib.serve.batch import answer_batch as answer_batch
from shardlib.serve.bodies import BodyError as BodyError
