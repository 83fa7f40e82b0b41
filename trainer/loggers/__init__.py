"""Where the metrics of a run are written: metrics.jsonl always, and the loggers of `logger=`."""

from trainer.loggers.base import Logger
from trainer.loggers.run_log import RunLog

__all__ = ["Logger", "RunLog"]
