"""What other libraries do at length in each process is done shortly; `cold` programs are left as they are."""

from __future__ import annotations

import os

import yaml
from hydra._internal.hydra import Hydra
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

# Each operation on fake tensors is made once more for a cache, which only a model of many equal layers uses.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
if yaml.__with_libyaml__:
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc,assignment] # of OmegaConf
# To look for hydra.mode, which nobody sets, Hydra composes all before it composes all.
Hydra.get_mode = lambda self, **_: None  # type: ignore[method-assign]
# To name who records an event, torchrun looks through all modules 18 times: a second of a processor.
dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
