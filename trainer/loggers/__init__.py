"""Destinations of a run's metrics: metrics.jsonl, and the loggers of `logger=`."""

from trainer.loggers.base import Logger
from trainer.loggers.run_log import RunLog

__all__ = ["Logger", "RunLog"]
