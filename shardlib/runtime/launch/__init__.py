"""Launcher of the processes of a run."""

from shardlib.runtime.launch.local import run_local as run_local
from shardlib.runtime.launch.local import shardlib_command as shardlib_command
from shardlib.runtime.launch.progress import report_failure as report_failure
from shardlib.runtime.launch.progress import report_progress as report_progress
from shardlib.runtime.launch.progress import report_rewind as report_rewind
