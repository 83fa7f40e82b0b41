"""Where the figures of a run go: metrics.jsonl always, and whatever `logger=` names beside it."""

from trainer.loggers.base import Logger
from trainer.loggers.run_log import RunLog

__all__ = ["Logger", "RunLog"]
