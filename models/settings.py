"""Reading what a configuration file may hold in any form: objects, lists, and numbers in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.graph.errors import VerifyError
from tilewright.models.record import shown

MAX_INT = 1 << 31  # of any size: far beyond every model's
MAX_REAL = 1e30


def below(value: object, limit: float) -> str:
    """Return the bound, for an error, where it is what a value breaks."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f" below {limit}" if is_number and value >= limit else ""  # type: ignore[operator]


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object of the configuration, empty where the key is absent or null."""
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise VerifyError(f"config '{key}': got {shown(found)}, want an object")
    return found


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text model, which files with other parts keep in an object."""
    return {**config, **section(config, "text_config")}


def listed(config: Mapping[str, Any], key: str, want: str) -> list[Any]:
    """Return a list of the configuration, empty where the key is absent or null."""
    found = config.get(key)
    if found is None:
        return []
    if not isinstance(found, (list, tuple)):
        raise VerifyError(f"config '{key}': got {shown(found)}, want {want}")
    return list(found)


def scaling_number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number of a rotary scaling; without a default it has to be there."""
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MAX_REAL:
        want = f"a positive number{below(value, MAX_REAL)}"
        raise VerifyError(f"config 'rope_scaling.{key}': got {shown(value)}, want {want}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Return a yes or no of the configuration, its default where the key is absent. Null is no,
    which is refused where the default is yes."""
    value = config.get(key, default)
    value = False if value is None and not default else value
    if not isinstance(value, bool):
        raise VerifyError(f"config '{key}': got {shown(value)}, want true or false")
    return value
