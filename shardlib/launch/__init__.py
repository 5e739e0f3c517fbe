"""Starting the processes of a run."""

from shardlib.launch.local import run_local as run_local
from shardlib.launch.local import shardlib_command as shardlib_command
from shardlib.launch.progress import report_failure as report_failure
from shardlib.launch.progress import report_progress as report_progress
from shardlib.launch.progress import report_rewind as report_rewind
