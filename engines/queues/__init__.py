"""Orders of service: one small file each. `engine.queue` names the file."""

from __future__ import annotations

from engines import plugins
from engines.config import EngineConfig, lanes_of, settings_of
from engines.lanes import Lanes, LaneSettings
from engines.queues.base import WaitingQueue


def names() -> list[str]:
    return plugins.names(__name__)


def queue_class(name: str) -> type[WaitingQueue]:
    """The queue of engines/queues/<name>.py, or of `package.module:Class`. Raises PluginError."""
    found: type[WaitingQueue] = plugins.find(name, __name__, WaitingQueue)
    return found


def build(config: EngineConfig, whole_prompts: bool) -> WaitingQueue:
    """The queue that the configuration names, or one for each of its lanes."""

    def order(lane: LaneSettings) -> WaitingQueue:
        name = lane.queue or config.queue
        policy = lane.queue_policy if lane.queue else config.queue_policy
        queue = queue_class(name)
        return queue(settings_of(policy, queue.Settings, "queue_policy"))

    if config.lanes:
        return Lanes(lanes_of(config.lanes), order, whole_prompts)
    return order(LaneSettings())
