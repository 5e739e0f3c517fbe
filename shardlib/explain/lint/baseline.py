"""Baselines: files of accepted findings that a user keeps with the code.

    {
      "accepted": [
        {
          "code": "SL105",
          "place": "layers[*]/mlp/up dot_general (forward) in model.py:*",
          "why": "heads of 64"
        }
      ]
    }

A finding is accepted by its code and its place: the path of a parameter, the name of an operation
with its function, or a mesh axis. A place has no line number, so edits elsewhere do not change it.
`*` in a place matches anything. The file is YAML if it ends with `.yaml` or `.yml`, else JSON.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardlib.config import from_yaml
from shardlib.errors import ConfigError, did_you_mean
from shardlib.explain.lint.findings import CODES, Finding

_YAML = (".yaml", ".yml")
_FIELDS = ("code", "place", "why")
_REPAIR = "Correct it, or rewrite it with --accept."


@dataclasses.dataclass(frozen=True)
class Accepted:
    """One accepted finding, or several if `place` has a `*`."""

    code: str
    place: str
    why: str = ""

    def covers(self, finding: Finding) -> bool:
        """Whether this entry accepts a finding."""
        # Brackets are part of names, not character classes.
        pattern = self.place.replace("[", "[[]")
        return finding.code == self.code and fnmatch.fnmatchcase(finding.place, pattern)

    def __str__(self) -> str:
        return f"{self.code} {self.place}"


@dataclasses.dataclass(frozen=True)
class Judged:
    """New findings, accepted findings, and entries that match no finding."""

    new: tuple[Finding, ...]
    accepted: tuple[Finding, ...]
    unused: tuple[Accepted, ...]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The entries of a baseline."""

    entries: tuple[Accepted, ...] = ()

    def judge(self, findings: Iterable[Finding]) -> Judged:
        """Returns the new findings, the accepted findings and the unused entries."""
        findings = tuple(findings)
        covered = {
            finding: [entry for entry in self.entries if entry.covers(finding)]
            for finding in findings
        }
        used = {entry for entries in covered.values() for entry in entries}
        return Judged(
            tuple(finding for finding in findings if not covered[finding]),
            tuple(finding for finding in findings if covered[finding]),
            tuple(entry for entry in self.entries if entry not in used),
        )


def baseline_of(findings: Iterable[Finding], old: Baseline | None = None) -> Baseline:
    """Returns the baseline for these findings. Matching old entries keep their reasons."""
    accepted = old.entries if old is not None else ()
    entries = []
    for finding in findings:
        kept = next((entry for entry in accepted if entry.covers(finding)), None)
        entries.append(kept or Accepted(finding.code, finding.place))
    return Baseline(tuple(sorted(dict.fromkeys(entries), key=str)))


def read_baseline(path: str | Path) -> Baseline:
    """Reads a baseline.

    Raises:
        ConfigError: If the file cannot be read, or if entries are malformed. It names all of them.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"the baseline {path} does not exist.\n"
            "  Write it from the present faults with --accept."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the baseline {path} cannot be read: {error.strerror}.\n  Name a file."
        ) from None
    except UnicodeError:
        raise ConfigError(
            f"the baseline {path} is not UTF-8 text.\n  Rewrite it with --accept."
        ) from None
    data = _parsed(path, text)
    entries = data.get("accepted") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(
            f"the baseline {path} has no list 'accepted'.\n"
            '  Write {"accepted": [{"code": "SL105", "place": '
            '"layers[*]/mlp/up dot_general (forward) in model.py:*"}]}.'
        )
    faults = [f"entry {n}: {fault}" for n, e in enumerate(entries, 1) if (fault := _fault(e))]
    if faults:
        listed = "\n  ".join(faults)
        raise ConfigError(f"the baseline {path} is malformed:\n  {listed}\n  {_REPAIR}")
    return Baseline(tuple(Accepted(**entry) for entry in entries))


def write_baseline(baseline: Baseline, path: str | Path) -> None:
    """Writes a baseline, as YAML if the path ends with `.yaml` or `.yml`, else as JSON.

    Raises:
        ConfigError: If the file cannot be written.
    """
    path = Path(path)
    entries = [
        {name: value for name, value in dataclasses.asdict(entry).items() if value}
        for entry in baseline.entries
    ]
    data = {"accepted": entries}
    if path.suffix in _YAML:
        import yaml

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    else:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the baseline {path} cannot be written: {error.strerror}.\n"
            "  Name a file in a writable directory."
        ) from None


def _parsed(path: Path, text: str) -> Any:
    if path.suffix in _YAML:
        return from_yaml(text, f"the baseline {path}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the baseline {path} is not JSON: {error}.\n  {_REPAIR}") from None
    except RecursionError:
        raise ConfigError(
            f"the baseline {path} is not a list of findings: it nests too deeply.\n  {_REPAIR}"
        ) from None


def _fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f"{entry!r} is not a mapping with 'code' and 'place'"
    for name in entry:
        if name not in _FIELDS:
            return f"{name!r} is unknown.{did_you_mean(str(name), _FIELDS)}"
    for name in ("code", "place"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            return f"it has no {name!r}"
    if not isinstance(entry.get("why", ""), str):
        return "'why' is not a string"
    if entry["code"] not in CODES:
        return f"{entry['code']!r} is not a code.{did_you_mean(entry['code'], CODES)}"
    return ""
