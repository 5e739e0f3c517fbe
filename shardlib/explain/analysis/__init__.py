"""Traffic, memory, FLOPs and bottlenecks of a compiled step."""
