"""Pipeline parallelism: schedules as data, and one program that runs any of them."""

from shardlib.pipeline.config import PipelineConfig as PipelineConfig
from shardlib.pipeline.schedules import bubble_fraction as bubble_fraction
from shardlib.pipeline.schedules import forward_schedule as forward_schedule
from shardlib.pipeline.schedules import make_schedule as make_schedule
from shardlib.pipeline.schedules import schedule_faults as schedule_faults
