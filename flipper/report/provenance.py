"""Provenance: the machines that ran a campaign, the file that asks for it again, and the commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, Final

from flipper.campaigns.folder import Campaign
from flipper.campaigns.results import Results
from flipper.campaigns.spec import Spec
from flipper.errors import DAMAGED
from flipper.shell_words import path_word

_ELSEWHERE: Final = ("slices", "census", "commands", "metrics", "here")
"""Fields of a spec that are no keys of [campaign]."""


_ALWAYS: Final = ("seed", "metric", "better")
"""Keys that stand in the file even with their default: others may change what that is."""


def machines(results: Results) -> list[dict[str, str]]:
    """Each kind of machine that golden runs were made on: its short name, and what it stands for where that is kept."""
    found = []
    for name in dict.fromkeys(golden.fingerprint for golden in results.goldens.values()):
        found.append({"fingerprint": name, **_machine(results.campaign, results, name)})
    return found


def _machine(campaign: Campaign, results: Results, name: str) -> dict[str, str]:
    for golden in results.goldens.values():
        if golden.fingerprint == name:
            home = campaign.folder.golden(name, golden.parallel, golden.training_seed)
            try:
                machine = json.loads((home / "golden.json").read_text("utf-8"))["machine"]
                return {str(key): str(value) for key, value in machine.items() if value}
            except DAMAGED:
                continue  # merged from elsewhere, or cleaned away
    return {}


def last_change(campaign: Campaign) -> str:
    """When results came last, in UTC."""
    changed = campaign.folder.results().stat().st_mtime
    return datetime.fromtimestamp(changed, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def commands(campaign: Campaign) -> list[tuple[str, str]]:
    """What repeats the campaign, or a trial of it, or prints more of it; each with what it does."""
    folder = _folder(campaign)
    spec = path_word(f"{campaign.spec.name}.toml")
    return [
        ("Run the campaign again, from the file above", f"flipper campaign run {spec} --out NEW-FOLDER"),
        ("All trials as a table", f"flipper campaign export {folder} --to csv -o trials.csv"),
        ("All numbers of this page", f"flipper campaign report {folder} --format json"),
    ]


def trial_command(campaign: Campaign) -> str:
    """What runs one trial again, with {cell} and {trial} to fill in."""
    return f"flipper campaign trial {_folder(campaign)} --cell {{cell}} --trial {{trial}}"


def _folder(campaign: Campaign) -> str:
    return path_word(campaign.folder.path.resolve().name)


def spec_text(spec: Spec) -> str:
    """A campaign file that asks for this campaign: the keys that differ from their defaults, and all axes."""
    defaults = Spec(name="", slices=())
    lines = ["[campaign]"]
    for each in fields(Spec):
        value = getattr(spec, each.name)
        if each.name not in _ELSEWHERE and (value != getattr(defaults, each.name) or each.name in _ALWAYS):
            if each.name == "trials" and (spec.census or spec.margin is not None):
                continue
            lines.append(f"{each.name} = {_toml(value)}")
    if spec.census:
        lines.append('trials = "all"')
    for number, part in enumerate(spec.slices, 1):
        lines.append("[axes]" if len(spec.slices) == 1 and part.trials is None else f"[[slices]]  # {number}")
        if part.trials is not None:
            lines.append(f"trials = {part.trials}")
        lines += [f"{axis} = {_toml(values)}" for axis, values in part.axes.items()]
    for table, values in (("commands", spec.commands), ("metrics", spec.metrics)):
        if values:
            lines.append(f"[{table}]")
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return _quoted(str(value))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    """JSON's string, which is TOML's too but for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
