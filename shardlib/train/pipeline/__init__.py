"""Pipeline parallelism: schedules as data, and one program that runs any of them."""

from shardlib.train.pipeline.config import PipelineConfig as PipelineConfig
from shardlib.train.pipeline.schedules import bubble_fraction as bubble_fraction
from shardlib.train.pipeline.schedules import forward_schedule as forward_schedule
from shardlib.train.pipeline.schedules import make_schedule as make_schedule
from shardlib.train.pipeline.schedules import schedule_faults as schedule_faults
