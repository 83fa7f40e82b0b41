"""Import the modules that ranks need, once, in the fork server of tests.ranks.

No tensor operation may run here, because its threads (OpenMP, autograd) would not survive the fork.
"""

import atexit
import contextlib
import gc
import os

gc.disable()  # collections take a quarter of the time of imports

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

with contextlib.suppress(Exception):  # the test that needs a broken module reports it better
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

# Half a million objects that need no further collection: the first full one of each rank would take 0.6 s,
# mostly for copying pages.
gc.enable()
gc.collect()
gc.freeze()
atexit.register(os._exit, 0)  # so that the server does not destroy them at exit
