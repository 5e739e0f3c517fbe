"""The command line: `shardlib train | explain | check | plan | calibrate | generate | batch |
serve | export | import | evaluate | checkpoint | devices | launch | schema`.

Exit codes: 0 for success; 2 for a wrong request (usage, config, mesh, rules, model, a step or
folder); 75 when the watchdog ended a process, or its peers have gone; 76 when training diverged; 1
for every other failure and for faults found by `explain --strict`.
"""

import glob
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shardlib.cli import checkpoint
from shardlib.cli.arguments import (
    AsJson,
    Command,
    CommandWithKeys,
    ConfigCommand,
    ConfigPath,
    Mesh,
    Overrides,
    check_named,
    console,
    load_config,
    warn,
)
from shardlib.cli.batch import batch
from shardlib.cli.check import check
from shardlib.cli.evaluate import evaluate
from shardlib.cli.explain import explain
from shardlib.cli.export import export
from shardlib.cli.import_model import import_model
from shardlib.cli.plan import calibrate, plan
from shardlib.cli.serve import serve
from shardlib.errors import (
    ConfigError,
    DivergedError,
    MeshError,
    ModelError,
    RuleError,
    ShardlibError,
    WrongPlaceError,
    check_run,
)
from shardlib.humanize import bandwidth, flops, gib
from shardlib.runtime.exit_codes import DIVERGED, FAILED, WRONG_REQUEST
from shardlib.tables import Table

# Each command imports its dependencies itself, so that `shardlib --help` does not wait for JAX.

# Errors that a change of the config or command fixes, unlike errors of data, files or processes.
_ASKED_WRONG = (ConfigError, MeshError, ModelError, RuleError, WrongPlaceError)

# Where a machine has no TPU, libtpu logs errors about what it cannot find out, unless these say it.
_TPU_ENVIRONMENT = {"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_WORKER_HOSTNAMES": "localhost"}
_TPU_DEVICE_FILES = ("/dev/accel*", "/dev/vfio/*")

app = typer.Typer(
    help="Named sharding for Flax models: train any model on any mesh.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, by default `sys.argv[1:]`, and exits the process."""
    _look_in_current_directory()
    if not any(map(glob.glob, _TPU_DEVICE_FILES)):
        os.environ.update(_TPU_ENVIRONMENT | os.environ)
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:own]
    words = [word for word in words[:own] if word != "--debug"] + words[own:]
    try:
        app(args=words, prog_name="shardlib")
    except SystemExit as ended:
        _exit(ended.code)
    except ShardlibError as error:
        if debug:
            traceback.print_exception(error)
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _exit(_code_of(error))


def _look_in_current_directory() -> None:
    """Makes the modules of the current directory importable, as `python -m` does: a config may name
    classes and functions in them."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def _code_of(error: ShardlibError) -> int:
    if isinstance(error, _ASKED_WRONG):
        return WRONG_REQUEST
    if isinstance(error, DivergedError):
        return DIVERGED
    distributed = sys.modules.get("shardlib.runtime.distributed")
    return distributed.exit_code(error) if distributed else FAILED


def _exit(code: str | int | None) -> None:
    """Ends the process: together with its group on success, and without waiting on failure."""
    distributed = sys.modules.get("shardlib.runtime.distributed")
    if distributed is None:  # The process has not joined a group.
        sys.exit(code)
    if not code:
        distributed.shutdown()
    distributed.exit_process(code)


def _print_version(value: bool) -> None:
    if value:
        from shardlib import __version__

        print(f"shardlib {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors; valid anywhere in the line.")
    ] = False,
) -> None:
    pass


@app.command(cls=CommandWithKeys)
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model; repeating the command resumes."""
    from shardlib.runtime.phases import PhaseClock, process_age_seconds

    # The account of time includes the start of Python and the imports.
    clock = PhaseClock(age_seconds=process_age_seconds())
    loaded = load_config(config, overrides)
    check_named(config, overrides, loaded.run_dir)
    from shardlib.run.training import train as run_train

    try:
        run_train(loaded, clock=clock)
    except KeyboardInterrupt:  # Before there was anything to save, or the second Ctrl-C.
        raise typer.Exit(130) from None


app.command(cls=ConfigCommand)(explain)
app.command(cls=ConfigCommand)(check)
app.command(cls=ConfigCommand)(plan)
app.command(cls=Command)(calibrate)
app.command(cls=Command)(evaluate)
app.command(cls=Command)(batch)
app.command(cls=Command)(serve)
app.command(cls=Command)(export)
app.command("import", cls=ConfigCommand)(import_model)
app.add_typer(checkpoint.app, name="checkpoint")


@app.command(cls=Command)
def generate(
    run: checkpoint.RunAtStep,
    prompt: Annotated[
        str, typer.Option(help="Text to continue, or the message to a run of chats.")
    ] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    mesh: Mesh = None,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint; default: the newest valid one.")
    ] = None,
) -> None:
    """Continue a prompt with a checkpoint of a run.

    A run that trained on chats reads the prompt as a message of the user and prints its answer.
    """
    run, step = checkpoint.one_step(run, step)
    check_run(run)
    from shardlib.run.sampling import generate as run_generate

    options = {"mesh": mesh, "step": step, "notify": warn, "echo": True}
    print(run_generate(run, prompt, length, temperature, seed, **options))


@app.command(cls=Command)
def devices(as_json: AsJson = False) -> None:
    """Show the devices, their chips and the mesh of `mesh: auto`."""
    import jax

    from shardlib.mesh import draw, make_mesh

    rows = [_device_facts(device) for device in jax.devices()]
    mesh = make_mesh("auto")
    if as_json:
        print(json.dumps({"devices": rows, "auto_mesh": dict(mesh.shape)}, indent=2))
        return
    terminal = console()
    terminal.print(_device_table(rows))
    terminal.print("mesh: auto gives\n" + draw(mesh), markup=False, highlight=False)


@app.command(cls=Command)
def launch(
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Processes to start.")],
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="-- ARGS", help="Arguments of `shardlib` in each process."),
    ],
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Restart a failed group until more than N attempts in a row have saved nothing "
            "new. Deterministic failures are not retried.",
        ),
    ] = 0,
) -> None:
    """Run a command as a group of several processes on this machine."""
    from shardlib.runtime.launch import local

    command = local.shardlib_command(arguments)
    raise typer.Exit(local.run_local(command, processes, restarts=restarts))


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of configs, for editors."""
    from shardlib.config import json_schema
    from shardlib.run.config import RunConfig

    print(json.dumps(json_schema(RunConfig), indent=2))


def _device_facts(device: Any) -> dict[str, Any]:
    from shardlib.hardware import chip_for

    chip = chip_for(device)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "id": device.id,
        "process": device.process_index,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_bytes": memory or (chip.memory_bytes_per_device if chip else None),
        "chip": chip.full_name if chip else None,
        "bf16_flops_per_second": chip.flops_per_device("bf16") if chip else None,
        "memory_bytes_per_second": (
            chip.memory_bytes_per_second / chip.devices_per_chip if chip else None
        ),
    }


def _device_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("id>", "process>", "kind", "chip", "memory>", "bf16 peak>", "memory bandwidth>")
    cells = []
    for row in rows:
        memory, peak = row["memory_bytes"], row["bf16_flops_per_second"]
        speed = row["memory_bytes_per_second"]
        cells.append(
            (
                str(row["id"]),
                str(row["process"]),
                row["kind"],
                row["chip"] or "-",
                "-" if memory is None else gib(memory),
                "-" if peak is None else f"{flops(peak)}/s",
                "-" if speed is None else bandwidth(speed),
            )
        )
    return Table("", columns, cells)
