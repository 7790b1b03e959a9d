"""Orders of service: one small file each. `engine.queue` names the file."""

from __future__ import annotations

from engines import plugins
from engines.queues.base import WaitingQueue


def names() -> list[str]:
    return plugins.names(__name__)


def queue_class(name: str) -> type[WaitingQueue]:
    """The queue of engines/queues/<name>.py, or of `package.module:Class`. Raises PluginError."""
    found: type[WaitingQueue] = plugins.find(name, __name__, WaitingQueue)
    return found
