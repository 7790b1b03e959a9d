"""Policies by name: one file each, found by looking, so that adding one needs no list to be edited."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

NOT_POLICIES = ("base",)


class PluginError(ValueError):
    """No such policy. The message is what follows `<setting>=<value>: `."""


def names(package: str) -> list[str]:
    """The policies of `package`: its modules, without `base` and those that begin with an underscore."""
    path = importlib.import_module(package).__path__
    found = (module.name for module in pkgutil.iter_modules(path))
    return sorted(name for name in found if name not in NOT_POLICIES and not name.startswith("_"))


def find(name: str, package: str, base: type[Any]) -> Any:
    """The subclass of `base` in `<package>.<name>`, or, from elsewhere, in `module:Class`. Raises
    PluginError."""
    policy = _elsewhere(name, base) if ":" in name else _here(name, package, base)
    if missing := getattr(policy, "__abstractmethods__", None):
        raise PluginError(f"has no {', '.join(sorted(missing))}, which a {base.__name__} needs")
    return policy


def _here(name: str, package: str, base: type[Any]) -> Any:
    if name not in names(package):
        raise PluginError(f"choose from {', '.join(names(package))}, or give module:Class")
    module = importlib.import_module(f"{package}.{name}")
    found = [value for value in vars(module).values() if _is_policy(value, base, module.__name__)]
    if len(found) != 1:
        raise PluginError(f"{module.__name__} needs exactly one {base.__name__}, it has {len(found)}")
    return found[0]


def _is_policy(value: Any, base: type, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value.__module__ == module


def _elsewhere(name: str, base: type[Any]) -> Any:
    module, _, attribute = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise PluginError(f"cannot be imported ({error})") from error
    if not (isinstance(value, type) and issubclass(value, base)):
        raise PluginError(f"is not a subclass of {base.__module__}.{base.__name__}")
    return value
