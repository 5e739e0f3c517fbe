"""Language models on published tasks, by lm-eval-harness."""

from shardlib.evaluation.harness import Tasks as Tasks
from shardlib.evaluation.harness import TaskScores as TaskScores
from shardlib.evaluation.harness import find_tasks as find_tasks
from shardlib.evaluation.harness import harness_model as harness_model
from shardlib.evaluation.harness import run_tasks as run_tasks
from shardlib.evaluation.text_model import TextModel as TextModel
