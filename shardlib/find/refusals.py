"""Errors of searches that find nothing that fits."""

from collections.abc import Sequence

from shardlib.errors import DoesNotFitError
from shardlib.humanize import gib


def does_not_fit(
    least: float, have: float, *, remats: Sequence[str] = (), any_microbatches: bool = False
) -> DoesNotFitError:
    """Returns the error for layouts that all hold more bytes than a device has, also with each
    rematerialisation that is named, and with any number of microbatches."""
    tried = f" with any remat ({', '.join(remats)})" if remats else ""
    others = [] if any_microbatches else ["microbatches", "a smaller batch"]
    others += [] if remats else ["rematerialisation"]
    return DoesNotFitError(
        f"no layout fits{tried}: a device needs at least {gib(least)} and has {gib(have)}.\n"
        f"  Use {', '.join(['more devices', *others])} or an optimizer with less state.",
        int(least),
    )


def state_does_not_fit(least: float, have: float) -> DoesNotFitError:
    """Returns the error for a state that alone holds more bytes than a device has."""
    return DoesNotFitError(
        f"the state fits in no layout: a device needs at least {gib(least)} and has {gib(have)}.\n"
        "  Use more devices, an optimizer with less state, or adapters.",
        int(least),
    )
