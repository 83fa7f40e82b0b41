"""The modules that every rank has loaded at its start: imported once, by the fork server of tests.ranks.

No tensor operation may run here: a thread it started (OpenMP, autograd) would not survive the fork.
"""

import atexit
import contextlib
import gc
import os

gc.disable()  # collections that find nothing are a quarter of the time that imports take

import matplotlib.backends.backend_agg
import matplotlib.pyplot
import PIL.features
import PIL.Image
import pytest
import safetensors.torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.utils.serialization.config
import torch.utils.tensorboard
import torchvision

with contextlib.suppress(Exception):  # the test that needs the broken module says so better
    import models.mlp
    import models.vision
    import models.vit
    import tests.programs
    import tests.ranks
    import tests.runs
    import tests.user_parts
    import trainer.data.digits
    import trainer.data.vision
    import trainer.loggers.tensorboard
    import trainer.optim.schedules
    import trainer.run
    import trainer.strategies.ddp
    import trainer.strategies.fsdp
    import trainer.strategies.parameter_server
    import trainer.tasks.pictures

    PIL.Image.preinit()
    tests.runs.settings()  # fills the caches of Hydra and of its parser

# Half a million objects that no collection needs to look at again: each rank's first full one would take
# 0.6 s, most of it for the pages that are copied because it counts in them.
gc.enable()
gc.collect()
gc.freeze()
atexit.register(os._exit, 0)  # and the server need not destroy them at its end
