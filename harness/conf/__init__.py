"""Configuration: what every command reads, composed by Hydra from the YAML files of this folder.

`compose(args)` turns Hydra-style overrides (`+workload=rag engine=chunked seed=1`) into one resolved, strict
configuration. It uses Hydra's compose API and nothing else of it: no change of folder, no logging set-up.
`expand(args)` turns a sweep (`engine=static,chunked seed=range(3)`) into one list of overrides a combination.
Whatever is wrong raises UsageError, whose message is one line: the setting, its value and what would work.

Hydra and OmegaConf are imported inside the functions, so that `--help` stays quick.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

FOLDER = Path(__file__).resolve().parent
GROUPS = ("workload", "engine", "model", "load", "slo", "experiment")
OPEN = ("engine.policy", "engine.queue_policy", "engine.lanes")
"""Nodes whose keys belong to the policy that another setting names: the engine checks them."""
MAX_COMBINATIONS = 1000
"""A sweep over more combinations than this is taken for a slip."""

NEEDED = {
    "model.id": "a hub id or a local folder",
    "engine.base_url": "the server's address, as http://host:port",
    "workload.path": "the trace's file",
}


class UsageError(ValueError):
    """What the user asked for cannot work. The message is one line."""


def choices(group: str) -> list[str]:
    """The names that `group=` takes: the group's YAML files, less the shared ones (leading underscore)."""
    return sorted(f.stem for f in (FOLDER / group).glob("*.yaml") if not f.stem.startswith("_"))


def compose(args: list[str], root: str = "config") -> DictConfig:
    """The configuration for these overrides: resolved, strict (unknown keys raise) and checked. root: the
    file that it begins with."""
    from harness.conf.checks import check

    overrides = _parse(args)
    for override, text in overrides:
        if override.is_sweep_override():
            raise UsageError(f"{text}: several values need -m; one value with commas needs '{_quoted(text)}'")
    groups: dict[str, str] = {}
    values: list[tuple[Override, str]] = []
    for override, text in overrides:
        if override.key_or_group in GROUPS:
            groups[override.key_or_group] = _choice(override, text)
        else:
            values.append((override, text))
    file = groups.pop("workload") if _is_file(groups.get("workload", "")) else None
    cfg = _compose_groups(groups, root)
    if file is not None:
        cfg.workload = load_workload_file(file)
    for override, text in values:
        _set(cfg, override, text)
    given = {override.key_or_group for override, _ in values}
    if given & {"slo.ttft_ms", "slo.tpot_ms"} and "slo.by_class" not in given:
        cfg.slo.by_class = False  # who sets a limit by hand means all
    _resolve(cfg)
    check(cfg)
    if root == "config" and cfg.load.get("utilization") is not None:
        from harness.capacity.store import at_utilization

        return at_utilization(cfg, [text for _, text in overrides])
    return cfg


def expand(args: list[str]) -> list[list[str]]:
    """One list of overrides per combination of a sweep's values, the first override varying slowest."""
    from hydra.errors import HydraException

    parsed = {override.key_or_group: (override, text) for override, text in _parse(args)}  # the last one wins
    axes: list[list[str]] = []
    for override, text in parsed.values():
        if not override.is_sweep_override():
            axes.append([text])
            continue
        try:
            names = list(itertools.islice(override.sweep_string_iterator(), MAX_COMBINATIONS + 1))
        except (HydraException, ValueError):  # interval() and glob() name no list of values, a step of 0 none
            raise UsageError(f"{text}: sweep with a,b,c or choice(a,b) or range(start,stop,step)") from None
        if not names:
            raise UsageError(f"{text}: is an empty sweep; give at least one value")
        axes.append([f"{override.get_key_element()}={name}" for name in names])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MAX_COMBINATIONS:
        raise UsageError(f"a sweep over more than {MAX_COMBINATIONS} combinations; give fewer values")
    return [list(combination) for combination in itertools.product(*axes)]


def unknown(what: str, name: str, known: Iterable[str], suggestion: str | None = None) -> UsageError:
    """The one wording for a name that does not exist: the name, the nearest one, all the choices."""
    known = sorted(known)
    near = [suggestion] if suggestion else difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UsageError(f"{what}{hint}; choose from: {', '.join(known) or 'nothing (none exists yet)'}")


def _parse(args: list[str]) -> list[tuple[Override, str]]:
    """(parsed override, its text) in order; `+group=x` and `++group=x` become `group=x`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for arg in args:
        text = re.sub(r"^\+{1,2}", "", arg.strip())
        if not re.match(r"[A-Za-z_][\w.@/-]*=", text):
            raise UsageError(f"{_shown(arg)}: not an override; write key=value, such as engine=chunked")
        if "oc.env" in text:
            key = text.split("=", 1)[0]
            raise UsageError(
                f"{key}: environment variables would end up in config.yaml; name keys with engine.api_key_env"
            )
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"{_shown(arg)}: cannot be read ({reason}); quote odd values: '{_quoted(text)}'"
            ) from None
        if override.package is not None or "/" in override.key_or_group:
            raise UsageError(f"{_shown(arg)}: groups are chosen by their plain name: {', '.join(GROUPS)}")
        parsed.append((override, text))
    return parsed


def _choice(override: Override, text: str) -> str:
    group, value = override.key_or_group, override.value()
    if isinstance(value, dict):
        raise UsageError(f"{text}: set single values, such as {group}.{next(iter(value), 'key')}=…")
    if isinstance(value, list):
        raise UsageError(f"{text}: takes one name; for a sweep write -m {group}={','.join(map(str, value))}")
    name = "" if value is None else str(value)
    if group == "workload" and _is_file(name):
        return name
    known = choices(group)
    if name not in known:
        raise unknown(f"{group}={name}: no such {group}", name, known)
    return name


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def load_workload_file(path: str) -> DictConfig:
    """The workload of a YAML file, as `python -m workloads fit` writes it. Raises UsageError."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        node = OmegaConf.load(Path(path).expanduser())
    except FileNotFoundError:
        known = ", ".join(choices("workload"))
        raise UsageError(f"workload={path}: no such file; give one, or choose from: {known}") from None
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"workload={path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(node, DictConfig) or not {"name", "kind"} <= set(node):
        raise UsageError(f"workload={path}: is no workload; needs the keys of harness/conf/workload/*.yaml")
    if "oc.env" in str(OmegaConf.to_container(node)):
        raise UsageError(
            f"workload={path}: environment variables would end up in config.yaml; write the value"
        )
    return node


def _compose_groups(groups: dict[str, str], root: str) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    # `experiment` is not in the defaults list of config.yaml, so Hydra wants it added rather than overridden.
    overrides = [f"{'+' if group == 'experiment' else ''}{group}={name}" for group, name in groups.items()]
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            return hydra_compose(root, overrides)
    except HydraException as error:
        raise UsageError(f"{' '.join(overrides) or 'config.yaml'}: {' '.join(str(error).split())}") from None


def _set(cfg: DictConfig, override: Override, text: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, value = override.key_or_group, override.value()
    for node in OPEN:
        if f"{key}.".startswith(f"{node}.") and (key != node or isinstance(value, dict)):
            _check_known(cfg, node, text)
            OmegaConf.update(cfg, key, value, merge=True, force_add=True)
            return
    _check_known(cfg, key, text)
    node = OmegaConf.select(cfg, key, throw_on_missing=False, throw_on_resolution_failure=False)
    if OmegaConf.is_dict(node):
        if value is None and key.startswith("workload."):  # the workload knows which may be absent
            OmegaConf.update(cfg, key, None, merge=False)
            return
        if not isinstance(value, dict):
            known = "; set one of: " + ", ".join(f"{key}.{k}" for k in node)
            raise UsageError(f"{text}: {key} holds settings{known if node else f', as {key}.name=value'}")
        for name, _ in _leaves(value, key):
            _check_known(cfg, name, text)
    if OmegaConf.is_list(node) and isinstance(value, dict):
        raise UsageError(f"{text}: needs a list, as {key}=[...]")
    try:
        OmegaConf.update(cfg, key, value, merge=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{text}: {str(error).splitlines()[0]}") from None


def _check_known(cfg: DictConfig, key: str, text: str) -> None:
    from omegaconf import OmegaConf

    parent: Any = cfg
    path = key.split(".")
    for depth, part in enumerate(path):
        if not OmegaConf.is_dict(parent):
            raise UsageError(f"{text}: {'.'.join(path[:depth])} is one value, it has no {part}")
        known = [str(k) for k in parent]  # `in` would miss a mandatory key without value
        if part not in known:
            inside = ".".join(path[:depth])
            elsewhere = [
                k for k, _ in _leaves(OmegaConf.to_container(cfg), "") if k.split(".")[-1] == path[-1]
            ]
            near = difflib.get_close_matches(part, known, n=1)
            suggestion = f"{inside}.{near[0]}" if near and inside else near[0] if near else None
            what = f"{key} is not a setting"
            if inside in GROUPS:
                what += f" of {inside}={parent.get('name') or parent.get('kind') or ''}".rstrip("=")
            raise unknown(what, part, known, suggestion or (elsewhere[0] if len(elsewhere) == 1 else None))
        if depth + 1 < len(path):
            parent = parent._get_node(part)  # the node itself: a missing value must not raise here


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all leaves of nested dictionaries."""
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))


def _resolve(cfg: DictConfig) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if not missing:
            OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    for key in missing:
        group = key.split(".")[0]
        name = OmegaConf.select(cfg, f"{group}.name") if group in GROUPS else None
        why = f" with {group}={name}" if name else ""
        raise UsageError(f"{key} is needed{why}: {NEEDED.get(key, 'it has no default')}")
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, value in _leaves(raw, ""):
        # An escaped \${...} is text now; whoever reads config.yaml would take it for a reference.
        if "${" in str(value):
            raise UsageError(f"{key}: must not hold ${{...}} as text; config.yaml could not be read back")
    OmegaConf.set_struct(cfg, True)


def _quoted(text: str) -> str:
    key, _, value = text.partition("=")
    return f'{key}="{value}"'


def _shown(arg: str) -> str:
    """An argument as one short line, whatever is in it."""
    line = " ".join(arg.split())
    return repr(line[:80] + "…") if len(line) > 80 else line or "''"
