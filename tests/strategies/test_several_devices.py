"""A model whose constructor placed it on several devices, here one of them the meta device, stays there."""

import pytest
import torch
from torch import nn

from trainer.errors import UserError
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.strategies.data_parallel import DataParallel
from trainer.strategies.ddp import device_ids
from trainer.strategies.parameter_server import ParameterServer
from trainer.strategies.placement import devices_of
from trainer.strategies.sharding import refuse_unshardable

CPU, META = torch.device("cpu"), torch.device("meta")
GPU = torch.device("cuda", 1)


def _placed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, device=META), nn.Linear(2, 2), nn.Linear(2, 2, device=META))


def test_a_multi_device_model_stays_and_batches_go_to_its_first_device() -> None:
    strategy = Strategy(CPU, ComputeOptions())
    model = strategy.wrap(_placed())
    assert [layer.weight.device for layer in model] == [META, CPU, META]  # type: ignore[attr-defined]
    assert strategy.devices == [META, CPU] and strategy.device == META
    whole = Strategy(META, ComputeOptions())
    assert devices_of(whole.wrap(nn.Linear(2, 2))) == whole.devices == [META]


def test_ddp_gets_no_device_ids() -> None:
    assert device_ids([GPU]) == [GPU]
    assert device_ids([CPU]) is None
    assert device_ids([GPU, torch.device("cuda", 3)]) is None


def test_strategies_that_place_models_refuse_multi_device_models() -> None:
    with pytest.raises(UserError, match=r"strategy=fsdp .* has placed it on meta, cpu; .* use strategy=ddp"):
        refuse_unshardable(_placed(), [])
    with pytest.raises(UserError, match=r"strategy=dp .* has placed it on meta, cpu"):
        DataParallel(CPU, ComputeOptions()).wrap(_placed())
    servers = object.__new__(ParameterServer)  # it raises the error before it needs a process group
    with pytest.raises(UserError, match=r"strategy=parameter_server .* has placed it on meta, cpu"):
        servers.wrap(_placed())
