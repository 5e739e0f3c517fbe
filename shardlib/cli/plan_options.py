"""The options of `shardlib plan`."""

from typing import Annotated

import typer

On = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="What to plan for: v5p-128, 2xv5e-256, 64x8xh100, or GPUs of several kinds, as "
        "8xh100+16xa100-80. A chip alone, as v5p, with --objective cost or chips, or with "
        "--tokens and --days: as many as it takes.",
    ),
]
Config = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="As for train; or give --model.")
]
Model = Annotated[
    str | None, typer.Option(help="A published model in place of a config: llama3-70b.")
]
GlobalBatch = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of a step: 4M is 4 x 2**20. (train.global_batch of a config counts "
        "sequences: 512 of 8192 tokens are 4M.)",
    ),
]
Length = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
Objective = Annotated[str, typer.Option(help="time, cost (chip-hours) or chips (the fewest).")]
WhyNot = Annotated[
    list[str] | None,
    typer.Option(metavar="MESH", help="Explain why not this mesh. May be given again."),
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Tokens of the whole run: 1T is 10**12. Default: what a config trains on."),
]
Days = Annotated[float | None, typer.Option(help="In how many days.")]
Price = Annotated[float | None, typer.Option(metavar="USD", help="Price of an hour of one chip.")]
Precision = Annotated[
    str | None,
    typer.Option(help="With --model: f32, bf16, bf16_params. Default bf16."),
]
Verify = Annotated[
    int,
    typer.Option(metavar="K", min=0, help="Compile the best K ahead of time, and rank them again."),
]
Top = Annotated[int, typer.Option(min=1, help="How many meshes to rank.")]
