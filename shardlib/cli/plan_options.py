"""The options of `shardlib plan`."""

from typing import Annotated

import typer

On = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="Cluster to plan for: v5p-128, 2xv5e-256, 64x8xh100, or GPUs of several kinds: "
        "8xh100+16xa100-80. A chip alone, such as v5p, with --objective cost or chips, or with "
        "--tokens and --days, plans for as many as needed.",
    ),
]
Config = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="A config, as for train; or give --model.")
]
Model = Annotated[
    str | None, typer.Option(help="A published model in place of a config: llama3-70b.")
]
GlobalBatch = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens per step: 4M is 4 x 2**20. (train.global_batch of a config counts "
        "sequences: 512 of 8192 tokens are 4M.)",
    ),
]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Objective = Annotated[str, typer.Option(help="time, cost (chip-hours) or chips (the fewest).")]
WhyNot = Annotated[
    list[str] | None,
    typer.Option(metavar="MESH", help="Explain why this mesh was not chosen. Repeatable."),
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Tokens of the whole run: 1T is 10**12. Default: the tokens of the config."),
]
Days = Annotated[float | None, typer.Option(help="Days for the whole run.")]
Price = Annotated[float | None, typer.Option(metavar="USD", help="Price per chip-hour.")]
Precision = Annotated[
    str | None,
    typer.Option(help="With --model: f32, bf16, bf16_params. Default bf16."),
]
Verify = Annotated[
    int,
    typer.Option(metavar="K", min=0, help="Compile the best K ahead of time, and rank them again."),
]
Top = Annotated[int, typer.Option(min=1, help="Number of meshes to rank.")]
